// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish"
)

// Config describes the topic. Empty fields take the default.
type Config struct {
	// Brokers to ask first, host:port. Required.
	Brokers []string
	// Topic is the topic's name; cell-events.
	Topic string
	// Settle bounds the wait for acknowledgements after a pause or a timeout;
	// [publish.DefaultSettle].
	Settle time.Duration
	// Options are for the client: credentials, certificates, compression.
	Options []kgo.Opt
}

// Publisher produces records to a topic. It is a [guard.Publisher], safe for
// concurrent use.
type Publisher struct {
	client *kgo.Client
	topic  string
	settle time.Duration
}

var topicName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,249}$`)

// New returns a publisher that connects when it is used. The error wraps
// [cells.ErrInvalid]. Close it.
func New(cfg Config) (*Publisher, error) {
	if cfg.Topic == "" {
		cfg.Topic = "cell-events"
	}
	if cfg.Settle == 0 {
		cfg.Settle = publish.DefaultSettle
	}
	switch {
	case len(cfg.Brokers) == 0:
		return nil, fmt.Errorf("%w: a Kafka publisher needs a broker", cells.ErrInvalid)
	case !topicName.MatchString(cfg.Topic) || cfg.Topic == "." || cfg.Topic == "..":
		return nil, fmt.Errorf("%w: topic name %q", cells.ErrInvalid, cfg.Topic)
	case cfg.Settle < 0:
		return nil, fmt.Errorf("%w: a duration of the Kafka publisher is negative", cells.ErrInvalid)
	}
	client, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(cfg.Brokers...), kgo.ClientID("cloister-relay"), kgo.DefaultProduceTopic(cfg.Topic),
		kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0), kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)),
		// A publication ends when its context and the grace have; see the package's doc.
		kgo.AllowIdempotentProduceCancellation(),
		kgo.RetryBackoffFn(func(n int) time.Duration { return min(50*time.Millisecond<<min(n, 6), 2*time.Second) }),
		kgo.ProduceRequestTimeout(5 * time.Second), kgo.DialTimeout(5 * time.Second), kgo.MetadataMinAge(100 * time.Millisecond),
	}, cfg.Options...)...)
	if err != nil {
		return nil, fmt.Errorf("%w: Kafka client: %w", cells.ErrInvalid, err)
	}
	return &Publisher{client: client, topic: cfg.Topic, settle: cfg.Settle}, nil
}

// Close ends the client. What is in flight fails.
func (p *Publisher) Close() { p.client.Close() }

// Publish implements [guard.Publisher]: it produces the events one after the other,
// and returns when the last one is acknowledged, or with a [guard.PartialError] that
// counts those that are. After ctx has ended it waits for the one in flight, at most
// for Settle.
func (p *Publisher) Publish(ctx context.Context, events []guard.Event) error {
	for i, e := range events {
		err := context.Cause(ctx)
		if err == nil {
			err = p.produce(ctx, e)
		}
		if err != nil {
			if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
				err = fmt.Errorf("%w: %w", cause, err)
			}
			return &guard.PartialError{Accepted: i, Err: err}
		}
	}
	return nil
}

func (p *Publisher) produce(ctx context.Context, e guard.Event) error {
	body, err := publish.Encode(e)
	if err != nil {
		return err
	}
	r := &kgo.Record{Topic: p.topic, Key: []byte(e.Tenant), Value: body}
	publish.Headers(e, func(name, value string) {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	})
	settling, cancel := publish.Settle(ctx, p.settle)
	defer cancel()
	// It returns when the record is stored or given up, not before.
	if err := p.client.ProduceSync(settling, r).FirstErr(); err != nil {
		return fmt.Errorf("%w: Kafka: event %d: %w", cells.ErrUnavailable, e.Seq, err)
	}
	return nil
}
