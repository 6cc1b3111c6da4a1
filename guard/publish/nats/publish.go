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

// position is a message of a subject: its sequence in the stream, 0 for none, and
// the event's number and id.
type position struct {
	seq   uint64
	event cells.EventSeq
	id    string
}

func positionOf(m *jetstream.RawStreamMsg) position {
	n, _ := strconv.ParseUint(m.Header.Get(publish.HeaderSeq), 10, 64) // 0: not one of ours
	return position{m.Sequence, cells.EventSeq(n), m.Header.Get(publish.HeaderID)}
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
		known, err := p.known(ctx, stream, at, events[n:])
		if err != nil {
			return n, err
		}
		if n += known; n == len(events) {
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
			p.remember(tenant, position{seq, events[n-1].Seq, events[n-1].ID})
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
	return positionOf(msg), nil
}

// known returns how many of the events, from the first, the stream has already; last
// is the subject's last message. They are accepted: the order of a subject is that of
// the outbox.
func (p *Publisher) known(ctx context.Context, s *stream, last position, events []guard.Event) (int, error) {
	for i := len(events) - 1; i >= 0; i-- {
		if events[i].ID == last.id {
			return i + 1, nil
		}
	}
	if last.event < events[0].Seq {
		return 0, nil
	}
	// The stream is further than all of them, or has another tenant's events of these
	// numbers: one of the same name that was deleted.
	subject := p.subject(events[0].Tenant)
	at, err := p.search(ctx, s, subject, last, events[0].Seq)
	n := 0
	for err == nil && n < len(events) && at.id == events[n].ID {
		if n++; n < len(events) {
			at, err = p.read(ctx, s, subject, at.seq+1)
		}
	}
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		err = nil
	}
	return n, err
}

// read returns the first message of the subject at a sequence or behind it.
func (p *Publisher) read(ctx context.Context, s *stream, subject string, seq uint64) (position, error) {
	m, err := s.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return position{}, fmt.Errorf("%w: NATS: %w", cells.ErrUnavailable, err)
	}
	if err != nil {
		return position{}, err
	}
	return positionOf(m), nil
}

// search returns the message of the subject that has the number, or a neighbour of
// where it would be. Numbers grow along a subject, so that it is halved, from its
// end, since what is looked for is near it.
func (p *Publisher) search(ctx context.Context, s *stream, subject string, last position, want cells.EventSeq) (position, error) {
	low, high := uint64(1), last.seq
	for step := uint64(1); step < last.seq; step *= 2 {
		at, err := p.read(ctx, s, subject, last.seq-step)
		if err != nil || at.event == want {
			return at, err
		}
		if at.event < want {
			low = at.seq + 1
			break
		}
		high = last.seq - step
	}
	for low < high {
		middle := low + (high-low)/2
		at, err := p.read(ctx, s, subject, middle)
		if err != nil || at.event == want {
			return at, err
		}
		if at.event < want {
			low = at.seq + 1
		} else {
			high = middle
		}
	}
	return p.read(ctx, s, subject, low)
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
