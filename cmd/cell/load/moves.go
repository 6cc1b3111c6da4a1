// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Mover starts a move and waits until the tenant is served by the other cell
// and nothing is left behind.
type Mover interface {
	Move(ctx context.Context, tenant, to string) (Moved, error)
	Place(ctx context.Context, tenant, cell string) error
}

// Moved is what a move's record says of it.
type Moved struct {
	ID        string        `json:"id"`
	From      string        `json:"from"`
	To        string        `json:"to"`
	Predicted time.Duration `json:"predicted_ns"`
	// Pause is the driver's measure: from QUIESCING to ACTIVE.
	Pause time.Duration `json:"pause_ns"`
	// Copy is the time of the preparation (snapshot, catch-up, first verification).
	Copy  time.Duration `json:"copy_ns"`
	Rows  int64         `json:"rows"`
	Bytes int64         `json:"bytes"`
	// Clients has, for each client of the tenant, the longest that it waited for one
	// answer while the cut was going on; Client is the longest of them.
	Clients []time.Duration `json:"clients_ns"`
	Client  time.Duration   `json:"client_ns"`
	// CutFrom and CutTo bound the cut by this machine's clock.
	CutFrom time.Time `json:"cut_from"`
	CutTo   time.Time `json:"cut_to"`
	// Cut is how long each step of the cut took, in order.
	Cut []CutStep `json:"cut"`
}

// CutStep is one step of a cut.
type CutStep struct {
	Step string        `json:"step"`
	Took time.Duration `json:"took_ns"`
}

// MoveRun describes a run: one tenant moved back and forth while it and others
// are used.
type MoveRun struct {
	Edge       string
	Cells      [2]string
	Rows, Size int
	Clients    int
	// Think is how long each of them pauses between two requests; 0 is not at all. Rate
	// is how many requests a second they send together; 0 is as many as are answered.
	Think time.Duration
	Rate  float64
	// WriteShare is how many of a hundred requests write; 0 means 50.
	WriteShare   int
	Moves        int
	OtherClients int
	OtherPerCell int
	Mover        Mover
	OnStep       func(string)
}

// MoveReport is what came of a run.
type MoveReport struct {
	// Tenants are those that were placed for it; they stay.
	Tenants []string `json:"tenants"`
	Rows    int      `json:"rows"`
	Size    int      `json:"row_bytes"`
	Clients int      `json:"clients"`
	Moves   []Moved  `json:"moves"`
	Moving  Tally    `json:"moving_tenant"`
	Others  Tally    `json:"other_tenants"`
	// Events seen by a subscriber of the moving tenant; Gaps and Repeats must be 0.
	Events      uint64        `json:"events"`
	Gaps        int           `json:"event_gaps"`
	Repeats     int           `json:"event_repeats"`
	Reconnects  int           `json:"stream_reconnects"`
	Elapsed     time.Duration `json:"elapsed_ns"`
	OtherP99    time.Duration `json:"other_p99_ns"`
	MovingP99   time.Duration `json:"moving_p99_ns"`
	WritesPerS  float64       `json:"writes_per_second"`
	MissedInEnd int           `json:"events_missing_at_end"`
}

// Clean reports whether nothing failed and nothing was lost.
func (r *MoveReport) Clean() bool {
	return r.Moving.Clean() && r.Others.Clean() && r.Gaps+r.Repeats+r.MissedInEnd == 0
}

// Run places the tenants, fills the moving one, and moves it while everything is
// in use. The report is good also when an error comes with it.
func (m MoveRun) Run(ctx context.Context) (*MoveReport, error) {
	rep := &MoveReport{Rows: m.Rows, Size: m.Size, Clients: m.Clients}
	hc := NewHTTPClient(m.Clients + 4*m.OtherClients + 8)
	defer hc.CloseIdleConnections()
	id := time.Now().UnixNano() % 1e9
	moving := &Client{Base: m.Edge, Tenant: fmt.Sprintf("moving-%d", id), HTTP: hc}
	if err := m.Mover.Place(ctx, moving.Tenant, m.Cells[0]); err != nil {
		return rep, err
	}
	rep.Tenants = append(rep.Tenants, moving.Tenant)
	var others []*Hammer
	for _, cell := range m.Cells {
		for j := range m.OtherPerCell {
			c := &Client{Base: m.Edge, Tenant: fmt.Sprintf("other-%s-%d-%d", cell, j, id), HTTP: hc}
			if err := m.Mover.Place(ctx, c.Tenant, cell); err != nil {
				return rep, err
			}
			rep.Tenants = append(rep.Tenants, c.Tenant)
			others = append(others, &Hammer{Client: c, Clients: m.OtherClients, Keys: 20, Pause: 10 * time.Millisecond})
		}
	}
	m.OnStep(fmt.Sprintf("writing %d rows of %d bytes", m.Rows, m.Size))
	if err := moving.Fill(ctx, "bulk", m.Rows, m.Size, func(int) {}); err != nil {
		return rep, err
	}
	main := &Hammer{Client: moving, Clients: m.Clients, Keys: 200, Pause: m.Think, Rate: m.Rate, WriteShare: m.WriteShare}

	hammering, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	for _, h := range append(others, main) {
		wg.Go(func() { h.Run(hammering) })
	}
	sub := &subscriber{}
	listening, stopListening := context.WithCancel(ctx)
	defer stopListening()
	var listener sync.WaitGroup
	listener.Go(func() {
		_ = moving.Stream(listening, 0, sub.on, func(error) { sub.again() })
	})
	begin := time.Now()
	err := m.moves(ctx, moving.Tenant, main, rep)
	rep.Elapsed = time.Since(begin)
	stop()
	wg.Wait()

	m.OnStep("checking every write and event")
	last, err2 := moving.Set(ctx, "end", "last", "done", -1)
	if err2 == nil {
		err2 = sub.wait(ctx, last.EventSeq)
	}
	stopListening()
	listener.Wait()
	sub.report(rep, last.EventSeq)
	rep.Moving, err2 = verify(ctx, err2, main)
	rep.MovingP99 = percentile(main.Ops(), 99)
	rep.WritesPerS = float64(rep.Moving.Writes) / rep.Elapsed.Seconds()
	var all []Op
	for _, h := range others {
		var t Tally
		t, err2 = verify(ctx, err2, h)
		rep.Others.add(t)
		all = append(all, h.Ops()...)
	}
	rep.OtherP99 = percentile(all, 99)
	return rep, errors.Join(err, err2)
}

func verify(ctx context.Context, before error, h *Hammer) (Tally, error) {
	t, err := h.Verify(ctx)
	return t, errors.Join(before, err)
}

func (t *Tally) add(o Tally) {
	t.Requests += o.Requests
	t.Writes += o.Writes
	t.Failed += o.Failed
	t.Unknown += o.Unknown
	t.Lost += o.Lost
	t.Duplicated += o.Duplicated
	t.Phantom += o.Phantom
	if t.FirstFailure == "" {
		t.FirstFailure = o.FirstFailure
	}
	if t.FirstLoss == "" {
		t.FirstLoss = o.FirstLoss
	}
}

func (m MoveRun) moves(ctx context.Context, tenant string, main *Hammer, rep *MoveReport) error {
	for i := range m.Moves {
		to := m.Cells[(i+1)%2]
		m.OnStep(fmt.Sprintf("move %d of %d, to %s", i+1, m.Moves, to))
		mv, err := m.Mover.Move(ctx, tenant, to)
		if err != nil {
			return fmt.Errorf("move %d: %w", i+1, err)
		}
		mv.Clients = main.Waits(mv.CutFrom, mv.CutTo)
		mv.Client = Percentile(mv.Clients, 100)
		rep.Moves = append(rep.Moves, mv)
	}
	return nil
}

// subscriber checks that a stream's events have no gap and no repetition.
type subscriber struct {
	mu                    sync.Mutex // guards the rest
	last                  uint64
	gaps, repeats, agains int
	changed               chan struct{}
}

func (s *subscriber) on(e Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case e.Seq <= s.last:
		s.repeats++
	case e.Seq != s.last+1:
		s.gaps++
	}
	s.last = max(s.last, e.Seq)
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
	return nil
}

func (s *subscriber) again() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agains++
}

// wait blocks until the event of that number has arrived, at most 30 s.
func (s *subscriber) wait(ctx context.Context, seq uint64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, fmt.Errorf("event %d did not arrive", seq))
	defer cancel()
	for {
		s.mu.Lock()
		if s.last >= seq {
			s.mu.Unlock()
			return nil
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		ch := s.changed
		s.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *subscriber) report(rep *MoveReport, want uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rep.Events, rep.Gaps, rep.Repeats, rep.Reconnects = s.last, s.gaps, s.repeats, s.agains
	if s.last < want {
		rep.MissedInEnd = int(want - s.last)
	}
}

func percentile(ops []Op, p int) time.Duration {
	var d []time.Duration
	for _, op := range ops {
		if op.Err == nil {
			d = append(d, op.Return.Sub(op.Call))
		}
	}
	return Percentile(d, p)
}

// Percentile returns the p-th percentile by nearest rank; 0 of nothing.
func Percentile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return d[min(len(d)-1, max(0, (p*len(d)+99)/100-1))]
}

// WaitServed asks until the edge answers a request of the tenant, whatever the
// service answers to it.
func WaitServed(ctx context.Context, c *Client) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		_, err := c.Get(ctx, "probe", "probe")
		var se *StatusError
		if err == nil || errors.As(err, &se) && se.Status == http.StatusNotFound && se.Code == "NO_SUCH_MEMORY" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("tenant %s is not served: %w", c.Tenant, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
