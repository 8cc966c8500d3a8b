// Publishes lines of standard input to a stream: go run ./producer ADDRESS[,ADDRESS...] NAMESPACE/KEY < FILE
//
// Each request carries its number and that of the one before. So a request that was not answered can be sent again,
// also to another silo, without storing anything twice.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "example.org/headrace/v1"
)

const maxEvents = 1000

func main() {
	log.SetFlags(0)
	log.SetPrefix("producer: ")
	namespace, key, found := strings.Cut(strings.Join(os.Args[2:], ""), "/")
	if !found {
		log.Fatal("usage: producer ADDRESS[,ADDRESS...] NAMESPACE/KEY < FILE")
	}
	var silos []pb.PublisherServiceClient
	for _, address := range strings.Split(os.Args[1], ",") {
		connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			log.Fatal(err)
		}
		silos = append(silos, pb.NewPublisherServiceClient(connection))
	}
	sequence, stored := &pb.ProducerSequence{Producer: rand.Text()}, 0
	for input, more := bufio.NewReader(os.Stdin), true; more; {
		batch := &pb.EventBatch{Namespace: namespace, Key: key}
		for more && len(batch.Sizes) < maxEvents && (len(batch.Sizes) == 0 || input.Buffered() > 0) {
			line, err := input.ReadBytes('\n') // lines that came together are stored together
			if more = err == nil; more || len(line) > 0 {
				line = bytes.TrimSuffix(line, []byte("\n"))
				batch.Sizes = append(batch.Sizes, uint32(len(line)))
				batch.Payload = append(batch.Payload, line...)
			}
		}
		if len(batch.Sizes) > 0 {
			sequence.Previous, sequence.Number = sequence.Number, sequence.Number+1
			silos = publish(silos, &pb.PublishRequest{Sequence: sequence, Batches: []*pb.EventBatch{batch}})
			stored += len(batch.Sizes)
		}
	}
	fmt.Printf("%d events are stored\n", stored)
}

// Return when the events are durable. Tries the silos in turn, as long as that may help, and returns them in this order.
func publish(silos []pb.PublisherServiceClient, request *pb.PublishRequest) []pb.PublisherServiceClient {
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		_, err := silos[0].Publish(ctx, request)
		cancel()
		if err == nil {
			return silos
		}
		switch status.Code(err) {
		case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded:
			log.Printf("%v: trying again", err)
		default:
			log.Fatal(err)
		}
		silos = append(silos[1:], silos[0])
		time.Sleep(200 * time.Millisecond)
	}
}
