// Prints the events of a subscription: go run ./consumer ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]
//
// Creates the subscription if it does not exist. Any silo of a cluster passes on the events of the others. If the silo
// ends, the consumer goes on at the next address, or at the same one when it serves again.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "example.org/headrace/v1"
)

var created bool // if the subscription is deleted, it is not created again

func main() {
	log.SetFlags(0)
	log.SetPrefix("consumer: ")
	if len(os.Args) < 4 {
		log.Fatal("usage: consumer ADDRESS[,ADDRESS...] SUBSCRIPTION SELECTOR [CONSUMER]")
	}
	addresses, id := strings.Split(os.Args[1], ","), "c1"
	if len(os.Args) > 4 {
		id = os.Args[4]
	}
	start := &pb.Start{Position: &pb.Start_Earliest{Earliest: true}}
	definition := &pb.SubscriptionDefinition{Name: os.Args[2], Selector: os.Args[3], Start: start}
	pull := &pb.PullRequest{Subscription: definition.Name, Consumer: id, WaitMs: 1000}
	stopped, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	for failures := 0; ; failures++ {
		err := consume(stopped, addresses[failures%len(addresses)], definition, pull)
		if err == nil {
			return
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.ResourceExhausted {
			log.Fatal(err)
		}
		log.Printf("%v: trying again", err)
		time.Sleep(200 * time.Millisecond)
	}
}

// Pull from one silo until a signal, and then leave the group. The next pull reports what was printed. If it fails, the
// report is kept for the next silo, which ignores it if the queue has moved: then the events come again.
func consume(stopped context.Context, address string, definition *pb.SubscriptionDefinition, pull *pb.PullRequest) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx := context.Background()
	if !created {
		create := &pb.CreateSubscriptionRequest{Definition: definition}
		if _, err := pb.NewSubscriptionServiceClient(connection).CreateSubscription(ctx, create); err != nil {
			return err
		}
		created = true
	}
	for {
		pull.Leave = stopped.Err() != nil
		response, err := pb.NewConsumerServiceClient(connection).Pull(ctx, pull)
		if err != nil || pull.Leave {
			return err
		}
		pull.Reports = nil
		for _, batch := range response.Batches {
			print(batch)
			pull.Reports = append(pull.Reports, reportOf(batch, response.Queues))
		}
	}
}

// A batch is columns: the sizes of all payloads, and the payloads as one.
func print(batch *pb.EventBatch) {
	start := uint32(0)
	for _, size := range batch.Sizes {
		fmt.Printf("%s/%s %s\n", batch.Namespace, batch.Key, batch.Payload[start:start+size])
		start += size
	}
}

// Acknowledge all events of a batch, under the epoch and the generation of its queue.
func reportOf(batch *pb.EventBatch, queues []*pb.QueueStatus) *pb.QueueReport {
	done := &pb.Acknowledgement{Offset: batch.Offset}
	if indexes := batch.Indexes; len(indexes) > 0 { // only some events of the published batch were delivered
		done.Index, done.Count = indexes[0], indexes[len(indexes)-1]+1-indexes[0]
	}
	report := &pb.QueueReport{Queue: batch.Queue, Acknowledgements: []*pb.Acknowledgement{done}}
	for _, queue := range queues {
		if queue.Queue == batch.Queue {
			report.Epoch, report.Generation = queue.Epoch, queue.Generation
		}
	}
	return report
}
