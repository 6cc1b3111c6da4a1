// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish"
)

// position is the last message of a subject: its sequence in the stream, 0 for
// none, and the event's id.
type position struct {
	seq uint64
	id  string
}

// Headers of a batch that is stored as one; the client has no calls for them.
const (
	headerBatchID     = "Nats-Batch-Id"
	headerBatchSeq    = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
)

const (
	// maxBatch is below the server's limit of 1000.
	maxBatch = 500
	// maxRefusals bounds how often one call looks again where the subject stands.
	maxRefusals = 4
)

// errRefused: the subject's last message is another one than was thought.
var errRefused = errors.New("nats: another publisher has stored events of the tenant")

// Publish implements [guard.Publisher]. It returns when every event is
// acknowledged by the stream, or with a [guard.PartialError] that counts those that
// are. After ctx has ended it waits for what is in flight, at most for Settle.
func (p *Publisher) Publish(ctx context.Context, events []guard.Event) error {
	if len(events) == 0 {
		return nil
	}
	n, err := p.publish(ctx, events)
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	return &guard.PartialError{Accepted: n, Err: err}
}

func (p *Publisher) publish(ctx context.Context, events []guard.Event) (n int, err error) {
	tenant := events[0].Tenant
	msgs := make([]*nats.Msg, len(events))
	for i, e := range events {
		body, err := publish.Encode(e)
		if err == nil && e.Tenant != tenant {
			err = fmt.Errorf("%w: events of two tenants in one batch", cells.ErrInvalid)
		}
		if err != nil {
			return 0, err
		}
		msgs[i] = nats.NewMsg(p.subject(tenant))
		msgs[i].Data = body
		publish.Headers(e, msgs[i].Header.Set)
		msgs[i].Header.Set(jetstream.MsgIDHeader, e.ID)
		msgs[i].Header.Set(jetstream.ExpectedStreamHeader, p.cfg.Stream)
	}
	stream, err := p.find(ctx)
	if err != nil {
		return 0, err
	}
	oneByOne := !stream.atomic
	for refusals := 0; n < len(events); {
		at, err := p.position(ctx, stream, tenant)
		if err != nil {
			return n, err
		}
		// What the stream has already is accepted: its order is the outbox's.
		for i := len(events) - 1; i >= n; i-- {
			if events[i].ID == at.id {
				n = i + 1
				break
			}
		}
		if n == len(events) {
			return n, nil
		}
		if ctx.Err() != nil {
			return n, context.Cause(ctx)
		}
		k := 1
		if !oneByOne {
			k = min(len(events)-n, maxBatch)
		}
		seq, err := p.store(ctx, msgs[n:n+k], at.seq)
		switch {
		case err == nil:
			n += k
			p.remember(tenant, position{seq, events[n-1].ID})
			refusals = 0
		case errors.Is(err, errRefused) && refusals < maxRefusals:
			p.forget(tenant)
			refusals++
			oneByOne = true // one of them may be a repetition that only it finds
		default:
			p.forget(tenant)
			return n, err
		}
	}
	return n, nil
}

// store stores the messages behind sequence after of their subject, all or none,
// and returns the sequence of the last one; 0 if it was there before.
func (p *Publisher) store(ctx context.Context, msgs []*nats.Msg, after uint64) (uint64, error) {
	settling, cancel := publish.Settle(ctx, p.cfg.Settle)
	defer cancel()
	waiting, giveUp := context.WithCancelCause(settling)
	defer giveUp(nil)
	defer context.AfterFunc(p.connection(), func() { giveUp(errDisconnected) })()
	batch := nuid.Next()
	for i, m := range msgs {
		m.Header.Del(jetstream.ExpectedLastSubjSeqHeader)
		m.Header.Del(headerBatchID)
		m.Header.Del(headerBatchSeq)
		m.Header.Del(headerBatchCommit)
		if len(msgs) > 1 {
			m.Header.Set(headerBatchID, batch)
			m.Header.Set(headerBatchSeq, strconv.Itoa(i+1))
		}
	}
	msgs[0].Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(after, 10))
	last := msgs[len(msgs)-1]
	for _, m := range msgs[:len(msgs)-1] {
		if err := p.nc.PublishMsg(m); err != nil {
			return 0, fmt.Errorf("%w: NATS: %w", cells.ErrUnavailable, err)
		}
	}
	if len(msgs) > 1 {
		last.Header.Set(headerBatchCommit, "1")
	}
	answer, err := p.nc.RequestMsgWithContext(waiting, last)
	if err != nil {
		if settling.Err() != nil {
			// Nobody knows whether it arrives: nothing more goes out on this connection.
			_ = p.nc.ForceReconnect()
		}
		if waiting.Err() != nil {
			err = errors.Join(err, context.Cause(waiting))
		}
		return 0, fmt.Errorf("%w: NATS: %w", cells.ErrUnavailable, err)
	}
	var ack struct {
		Error     *jetstream.APIError `json:"error"`
		Stream    string              `json:"stream"`
		Sequence  uint64              `json:"seq"`
		Duplicate bool                `json:"duplicate"`
	}
	switch err := json.Unmarshal(answer.Data, &ack); {
	case err != nil:
		return 0, fmt.Errorf("%w: NATS: acknowledgement: %w", cells.ErrUnavailable, err)
	case ack.Error != nil && (len(msgs) > 1 || refused(ack.Error)):
		// A batch is refused for reasons that one message is not: it is looked at again.
		return 0, fmt.Errorf("%w: %w", errRefused, ack.Error)
	case ack.Error != nil:
		return 0, fmt.Errorf("%w: NATS: %w", cells.ErrUnavailable, ack.Error)
	case ack.Stream != p.cfg.Stream || ack.Sequence == 0:
		return 0, fmt.Errorf("%w: NATS: an acknowledgement of stream %q", cells.ErrUnavailable, ack.Stream)
	case ack.Duplicate:
		return 0, nil
	}
	return ack.Sequence, nil
}

func refused(e *jetstream.APIError) bool {
	return e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant
}

// position returns where the tenant's subject stands, as remembered or as read.
func (p *Publisher) position(ctx context.Context, s *stream, tenant cells.TenantID) (position, error) {
	p.mu.Lock()
	at, ok := p.last[tenant]
	p.mu.Unlock()
	if ok {
		return at, nil
	}
	msg, err := s.GetLastMsgForSubject(ctx, p.subject(tenant))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return position{}, nil
	}
	if err != nil {
		p.mu.Lock()
		p.stream = nil // it may be gone
		p.mu.Unlock()
		return position{}, fmt.Errorf("%w: NATS: the last event of tenant %s: %w", cells.ErrUnavailable, tenant, err)
	}
	return position{msg.Sequence, msg.Header.Get(publish.HeaderID)}, nil
}

func (p *Publisher) remember(tenant cells.TenantID, at position) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at.seq == 0 {
		delete(p.last, tenant) // stored before: what is behind it is not known
		return
	}
	if len(p.last) >= maxPositions {
		clear(p.last)
	}
	p.last[tenant] = at
}

func (p *Publisher) forget(tenant cells.TenantID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.last, tenant)
}
