// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Headers of a message, for those who route without reading the body. The body has
// all of it.
const (
	HeaderID     = "event-id"
	HeaderTenant = "event-tenant"
	HeaderSeq    = "event-seq"
	HeaderEpoch  = "event-epoch"
	HeaderCell   = "event-cell"
)

// Headers calls set for each header of the event's message, in a fixed order.
func Headers(e guard.Event, set func(name, value string)) {
	set(HeaderID, e.ID)
	set(HeaderTenant, string(e.Tenant))
	set(HeaderSeq, strconv.FormatUint(uint64(e.Seq), 10))
	set(HeaderEpoch, strconv.FormatUint(uint64(e.Epoch), 10))
	set(HeaderCell, string(e.Cell))
}

// Encode returns the body of the event's message: the event as JSON. The error
// wraps [cells.ErrInvalid].
func Encode(e guard.Event) ([]byte, error) {
	b, err := json.Marshal(e)
	if err == nil && (e.ID == "" || e.Seq == 0) {
		err = fmt.Errorf("it has no id or no number")
	}
	if err == nil {
		err = e.Tenant.Validate()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: event %d of tenant %q: %w", cells.ErrInvalid, e.Seq, e.Tenant, err)
	}
	return b, nil
}

// Decode is for consumers: it returns the event of a message's body. The error
// wraps [cells.ErrInvalid].
func Decode(body []byte) (guard.Event, error) {
	var e guard.Event
	if err := json.Unmarshal(body, &e); err != nil {
		return guard.Event{}, fmt.Errorf("%w: event: %w", cells.ErrInvalid, err)
	}
	if _, err := Encode(e); err != nil {
		return guard.Event{}, err
	}
	return e, nil
}

// Settle returns a context for what is sent while ctx runs: it goes on for grace
// after ctx has ended, so that an acknowledgement that is under way still counts.
// Its cause is that of ctx. Call cancel when everything is settled.
func Settle(ctx context.Context, grace time.Duration) (settling context.Context, cancel func()) {
	settling, end := context.WithCancelCause(context.WithoutCancel(ctx))
	var timer *time.Timer
	armed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		timer = time.AfterFunc(grace, func() { end(context.Cause(ctx)) })
		close(armed)
	})
	return settling, func() {
		if !stop() {
			<-armed
			timer.Stop()
		}
		end(context.Canceled)
	}
}

// DefaultSettle is how long publishers wait for what is in flight when their
// context has ended.
const DefaultSettle = 2 * time.Second
