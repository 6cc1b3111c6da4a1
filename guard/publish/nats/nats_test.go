// SPDX-License-Identifier: Apache-2.0

package nats_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/cloister-dev/cloister/guard/guardtest"
	"github.com/cloister-dev/cloister/guard/publish/publishertest"
)

// A stream that the publisher makes itself: batches are stored as one.
func TestConformance(t *testing.T) {
	publishertest.Run(guardtest.Wrap(t), harness(nil))
}

// A stream of an operator's: no batches, and a duplicate window that is over at
// once, so that only the expected sequence keeps repetitions out.
func TestConformanceOneByOne(t *testing.T) {
	publishertest.Run(guardtest.Wrap(t), harness(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond }))
}
