-- A control store as schema version 1 has it, by sqlite3's iterdump. Never changed.
BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	provider VARCHAR(255) NOT NULL, 
	subscription VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	next_offset BIGINT NOT NULL, 
	watermark BIGINT NOT NULL, 
	behind TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	checksum BIGINT DEFAULT 0 NOT NULL, 
	PRIMARY KEY (provider, subscription, queue)
);
INSERT INTO "checkpoints" VALUES('default','stats',0,7,3,'[["flights","N14228",3,0,"boom",[]]]',1,4229304227);
CREATE TABLE counters (
	name VARCHAR(255) NOT NULL, 
	value BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "counters" VALUES('epoch',1);
INSERT INTO "counters" VALUES('incarnation',1);
CREATE TABLE dead_letters (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	provider VARCHAR(255) NOT NULL, 
	subscription VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	token_offset BIGINT NOT NULL, 
	token_index BIGINT NOT NULL, 
	stream TEXT NOT NULL, 
	payload BLOB NOT NULL, 
	attributes TEXT NOT NULL, 
	timestamp_us BIGINT NOT NULL, 
	reason TEXT NOT NULL, 
	attempts INTEGER NOT NULL, 
	failed_at_us BIGINT NOT NULL, 
	redrive BOOLEAN NOT NULL, 
	checksum BIGINT DEFAULT 0 NOT NULL, 
	UNIQUE (provider, subscription, queue, token_offset, token_index, timestamp_us, checksum)
);
INSERT INTO "dead_letters" VALUES(1,'default','stats',0,3,0,'flights/N14228',X'00FF','{"id":null,"headers":{"carrier":"UA"}}',1,'boom',8,2,0,2304761608);
CREATE TABLE delayed_batches (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	provider VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	due_at_us BIGINT NOT NULL, 
	claim BIGINT NOT NULL, 
	producer VARCHAR(64) NOT NULL, 
	number BIGINT NOT NULL, 
	stream TEXT NOT NULL, 
	events INTEGER NOT NULL, 
	priority INTEGER NOT NULL, 
	batch BLOB NOT NULL, 
	checksum BIGINT DEFAULT 0 NOT NULL
);
INSERT INTO "delayed_batches" VALUES(1,'default',0,2000000,0,'148de9c5a7a44d19e56cd9ae1a554bf67847afb0c58f6e12fa29ac7ddfca9940',1,'flights/N14228',1,0,X'0A07666C696768747312064E31343232381A04050000002208D0E38D87ED6006007A056C61746572',3076763492);
INSERT INTO "delayed_batches" VALUES(2,'default',1,1000000,1000000,'',0,'flights/N14228',1,0,X'0A07666C696768747312064E31343232381A04070000002208833B8E87ED6006007A07636C61696D6564',2698909729);
CREATE TABLE delayed_calls (
	provider VARCHAR(255) NOT NULL, 
	producer VARCHAR(64) NOT NULL, 
	number BIGINT NOT NULL, 
	at_us BIGINT NOT NULL, 
	PRIMARY KEY (provider, producer)
);
INSERT INTO "delayed_calls" VALUES('default','148de9c5a7a44d19e56cd9ae1a554bf67847afb0c58f6e12fa29ac7ddfca9940',1,1000000);
CREATE TABLE entries (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "entries" VALUES('k','v');
CREATE TABLE gaps (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	provider VARCHAR(255) NOT NULL, 
	subscription VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	stream TEXT NOT NULL, 
	low_offset BIGINT NOT NULL, 
	low_index BIGINT NOT NULL, 
	high_offset BIGINT NOT NULL, 
	high_index BIGINT NOT NULL, 
	reason TEXT NOT NULL, 
	at_us BIGINT NOT NULL, 
	UNIQUE (provider, subscription, queue, stream, low_offset, low_index, high_offset, high_index)
);
INSERT INTO "gaps" VALUES(1,'default','stats',0,'flights/N14228',3,0,4,0,'old',5);
CREATE TABLE headrace_version (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "headrace_version" VALUES(1,1);
CREATE TABLE leases (
	provider VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	owner VARCHAR(255) NOT NULL, 
	incarnation BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	renewals BIGINT NOT NULL, 
	home VARCHAR(255) NOT NULL, 
	length_us BIGINT DEFAULT 15000000 NOT NULL, 
	PRIMARY KEY (provider, queue)
);
INSERT INTO "leases" VALUES('default',0,'',0,1,1,'',15000000);
CREATE TABLE providers (
	name VARCHAR(255) NOT NULL, 
	adapter VARCHAR(255) NOT NULL, 
	queues INTEGER NOT NULL, 
	mapper VARCHAR(255) NOT NULL, 
	options TEXT DEFAULT '{}' NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "providers" VALUES('default','log',8,'ring','{}');
CREATE TABLE releases (
	provider VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	producer VARCHAR(64) NOT NULL, 
	claim BIGINT NOT NULL, 
	holder VARCHAR(64) NOT NULL, 
	until_us BIGINT NOT NULL, 
	PRIMARY KEY (provider, queue)
);
INSERT INTO "releases" VALUES('default',1,'delays 159beea1fed04e2f92f637ab42d78572',1000000,'me',6000000);
CREATE TABLE silos (
	name VARCHAR(255) NOT NULL, 
	incarnation BIGINT NOT NULL, 
	address TEXT NOT NULL, 
	serves TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	joined_at_us BIGINT NOT NULL, 
	heartbeat_at_us BIGINT NOT NULL, 
	secret_hash VARCHAR(64) DEFAULT '' NOT NULL, 
	heartbeats BIGINT DEFAULT 0 NOT NULL, 
	settings TEXT DEFAULT '{}' NOT NULL, 
	process TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "silos" VALUES('a',1,'host:1','["default"]','left',1000000,1000000,'',0,'{}','');
CREATE TABLE subscriptions (
	provider VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	definition TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (provider, name)
);
INSERT INTO "subscriptions" VALUES('default','stats','{"name":"stats","selector":{"pattern":"flights/*"},"start":{"kind":"latest","token":null,"time_us":null},"retry":{"max_attempts":8,"max_elapsed_s":300.0,"initial_delay_s":0.1,"max_delay_s":30.0,"multiplier":2.0},"on_failure":"dead-letter","slow_consumer":null,"filter":null,"mode":"shared","circuit_breaker":true}',1);
CREATE TABLE suspicions (
	silo VARCHAR(255) NOT NULL, 
	voter VARCHAR(255) NOT NULL, 
	incarnation BIGINT NOT NULL, 
	voter_incarnation BIGINT NOT NULL, 
	heartbeats BIGINT NOT NULL, 
	PRIMARY KEY (silo, voter)
);
CREATE TABLE tokens (
	name VARCHAR(255) NOT NULL, 
	hash BLOB NOT NULL, 
	permissions TEXT NOT NULL, 
	created_at_us BIGINT NOT NULL, 
	client VARCHAR(255) DEFAULT '' NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "tokens" VALUES('t',X'0000000000000000000000000000000000000000000000000000000000000000','{"publish":["*"]}',1,'c');
CREATE INDEX delayed_batches_due ON delayed_batches (provider, due_at_us, id);
CREATE INDEX delayed_batches_taken ON delayed_batches (provider, queue, claim) WHERE claim > 0;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('dead_letters',1);
INSERT INTO "sqlite_sequence" VALUES('gaps',1);
INSERT INTO "sqlite_sequence" VALUES('delayed_batches',2);
COMMIT;
