// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// payload is the body of a request: type, timestamp and data as the specification
// recommends, and what an event has beside.
type payload struct {
	Type      string          `json:"type"`
	Timestamp time.Time       `json:"timestamp"`
	Data      json.RawMessage `json:"data"`
	ID        string          `json:"id"`
	Tenant    cells.TenantID  `json:"tenant"`
	Seq       cells.EventSeq  `json:"event_seq"`
	Epoch     cells.Epoch     `json:"epoch"`
	Cell      cells.CellID    `json:"cell,omitempty"`
}

// encode returns an event as the body of a request.
func encode(e guard.Event) ([]byte, error) {
	b, err := json.Marshal(payload{e.Type, e.At, e.Payload, e.ID, e.Tenant, e.Seq, e.Epoch, e.Cell})
	if err != nil {
		return nil, fmt.Errorf("%w: event %d of tenant %s: %w", cells.ErrInvalid, e.Seq, e.Tenant, err)
	}
	return b, nil
}

// Decode is for receivers: it returns the event that a request's body has. Verify
// the request first. The error wraps [cells.ErrInvalid].
func Decode(body []byte) (guard.Event, error) {
	var p payload
	if err := json.Unmarshal(body, &p); err != nil {
		return guard.Event{}, fmt.Errorf("%w: webhook body: %w", cells.ErrInvalid, err)
	}
	if p.ID == "" || p.Seq == 0 || p.Tenant.Validate() != nil {
		return guard.Event{}, fmt.Errorf("%w: the webhook body is no event of a tenant", cells.ErrInvalid)
	}
	return guard.Event{Tenant: p.Tenant, Seq: p.Seq, Epoch: p.Epoch, Cell: p.Cell, ID: p.ID, Type: p.Type, Payload: p.Data, At: p.Timestamp}, nil
}
