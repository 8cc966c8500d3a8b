-- A control store as the first version of headrace made it (schema version 1), by sqlite3's iterdump. Never changed.
BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	provider VARCHAR(255) NOT NULL, 
	subscription VARCHAR(255) NOT NULL, 
	queue INTEGER NOT NULL, 
	next_offset BIGINT NOT NULL, 
	watermark BIGINT NOT NULL, 
	behind TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (provider, subscription, queue)
);
INSERT INTO "checkpoints" VALUES('default','stats',0,7,3,'[["flights","N14228",3,0,"boom"]]',1);
CREATE TABLE counters (
	name VARCHAR(255) NOT NULL, 
	value BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "counters" VALUES('epoch',1);
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
	UNIQUE (provider, subscription, queue, token_offset, token_index)
);
INSERT INTO "dead_letters" VALUES(1,'default','stats',0,3,0,'flights/N14228',X'78','{"id":"flight-1","headers":{"carrier":"UA"}}',1,'boom',8,2,0);
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
CREATE TABLE headrace_schema (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "headrace_schema" VALUES(1,1);
CREATE TABLE providers (
	name VARCHAR(255) NOT NULL, 
	adapter VARCHAR(255) NOT NULL, 
	queues INTEGER NOT NULL, 
	mapper VARCHAR(255) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "providers" VALUES('default','log',8,'ring');
CREATE TABLE subscriptions (
	provider VARCHAR(255) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	definition TEXT NOT NULL, 
	epoch BIGINT NOT NULL, 
	PRIMARY KEY (provider, name)
);
INSERT INTO "subscriptions" VALUES('default','stats','{"name":"stats","selector":{"pattern":"flights/*"},"start":{"kind":"latest","token":null,"time_us":null},"retry":{"max_attempts":8,"max_elapsed_s":300.0,"initial_delay_s":0.1,"max_delay_s":30.0,"multiplier":2.0},"on_failure":"dead-letter","slow_consumer":null,"filter":null}',1);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('dead_letters',1);
INSERT INTO "sqlite_sequence" VALUES('gaps',1);
COMMIT;
