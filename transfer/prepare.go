// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// errRotate ends the reading of a view that has become old.
var errRotate = errors.New("transfer: the view is old")

// preparing is one attempt at Prepare.
type preparing struct {
	v        *Mover
	m        cells.MoveRef
	src      Source
	imp      Import
	tables   []TableInfo // in the order of copying
	total    int64
	bytes    int64
	pace     pacer
	progress func(cells.Progress)
	watch    *watch
	// perKey is the measured cost of comparing one key; 0 when not measured.
	perKey time.Duration
}

// Prepare implements Agent.
func (v *Mover) Prepare(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (cells.Prediction, error) {
	if err := validate(m); err != nil {
		return cells.Prediction{}, err
	}
	if r := v.take(m.ID); r != nil {
		v.end(r)
	}
	if err := limitsOf(ctx).Validate(); err != nil {
		return cells.Prediction{}, err
	}
	p := &preparing{v: v, m: m, src: src, pace: v.o.pacer(ctx)}
	var mu sync.Mutex // of whoever reports
	p.progress = func(pr cells.Progress) {
		mu.Lock()
		defer mu.Unlock()
		orNone(progress)(pr)
	}
	var out cells.Prediction
	var last, now Position
	var lastRows, rows int64
	err := v.retry(ctx, m, "prepare", 50*time.Millisecond, func() (err error) {
		out, err = p.watched(ctx)
		if p.imp != nil {
			st := p.imp.State()
			now, rows = st.Applied, 0
			for _, t := range st.Tables {
				rows += t.Rows
			}
			_ = p.imp.Close()
			p.imp = nil
		}
		return err
	}, func() bool {
		moved := now != last || rows != lastRows
		last, lastRows = now, rows
		return moved
	})
	return out, err
}

// watched is an attempt that ends with what its watch has found, if that ended it.
func (p *preparing) watched(ctx context.Context) (cells.Prediction, error) {
	if err := p.v.sink.Stale(ctx, p.m); err != nil {
		return cells.Prediction{}, err
	}
	wctx, w := p.watching(ctx)
	defer w.end()
	p.watch = w
	out, err := p.attempt(wctx)
	if cause := context.Cause(wctx); err != nil && cause != nil && ctx.Err() == nil {
		err = cause
	}
	return out, err
}

func (p *preparing) attempt(ctx context.Context) (out cells.Prediction, err error) {
	// At once: for a small tenant they are most of what a move takes.
	var ours, theirs Survey
	var oerr, terr error
	var wg sync.WaitGroup
	sctx := ContextForMove(ctx, p.m)
	wg.Go(func() { ours, oerr = p.v.surveyed(sctx, p.m.Tenant) })
	wg.Go(func() { theirs, terr = p.src.Survey(sctx, p.m.Tenant) })
	wg.Wait()
	if err := errors.Join(oerr, terr); err != nil {
		return out, err
	}
	pre := Compare(p.m, theirs, ours)
	if err := refuse(pre); err != nil {
		return out, err
	}
	p.tables, p.total, p.bytes = ours.Tables, pre.Rows, pre.Bytes
	if p.imp, err = p.v.sink.Import(ctx, p.m); err != nil {
		return out, err
	}
	if p.imp.State().Mark != "" {
		return cells.Prediction{Pause: p.v.o.steps}, nil
	}
	if err := p.v.o.fault("claimed"); err != nil {
		return out, err
	}
	var start Position
	if err := p.watch.wait(func() (err error) { start, err = p.begin(ctx); return err }); err != nil {
		return out, err
	}
	if err := p.v.o.fault("captured"); err != nil {
		return out, err
	}
	if p.imp.State().Start != start {
		opts := RemoveOptions{BatchRows: p.v.o.batchRows, Pace: p.pace.wait, Progress: p.progress}
		if err := p.imp.Restart(ctx, start, opts); err != nil {
			return out, err
		}
	}
	for st := p.imp.State(); !st.Copied || st.Verified == ""; st = p.imp.State() {
		if err := p.copy(ctx); err != nil && !errors.Is(err, errRotate) {
			return out, err
		}
	}
	if err := p.compareAll(ctx); err != nil {
		return out, err
	}
	if p.m.Keep {
		if err := p.keep(ctx); err != nil {
			return out, err
		}
	}
	return p.catchUp(ctx)
}

// copy opens a view, brings the import to it, copies as long as the view is young,
// and compares both sides when everything is copied.
func (p *preparing) copy(ctx context.Context) error {
	view, err := p.view(ctx)
	if err != nil {
		return err
	}
	defer view.Close()
	p.progress(cells.Progress{Phase: "catchup"})
	if err := align(ctx, p.imp, view); err != nil {
		return err
	}
	if err := p.v.o.fault("aligned"); err != nil {
		return err
	}
	began, base := time.Now(), p.done()
	for _, t := range p.tables {
		st := p.imp.State().Tables[t.Name]
		if st.Done {
			continue
		}
		if err := p.copyTable(ctx, view, t.Name, st.After, began, base); err != nil {
			return err
		}
	}
	return p.verify(ctx, view, whole(p.tables))
}

func (p *preparing) view(ctx context.Context) (view View, err error) {
	err = p.watch.wait(func() (err error) { view, err = p.src.View(ctx, p.m); return err })
	return view, err
}

func (p *preparing) done() (n int64) {
	for _, t := range p.imp.State().Tables {
		n += t.Rows
	}
	return n
}

func (p *preparing) report(table string, began time.Time, base int64) {
	done := p.done()
	out := cells.Progress{Phase: "snapshot", Table: table, Done: done, Total: max(p.total, done)}
	if p.total > 0 {
		out.Bytes = int64(float64(p.bytes) * float64(done) / float64(max(p.total, done)))
	}
	if n := done - base; n > 0 && p.total > done {
		out.Left = time.Duration(float64(time.Since(began)) * float64(p.total-done) / float64(n))
	}
	p.progress(out)
}

// verify compares sets at the view's position and records it.
func (p *preparing) verify(ctx context.Context, view View, sets []KeySet) error {
	p.progress(cells.Progress{Phase: "verify", Total: keyCount(sets)})
	start := time.Now()
	found, err := compare(ctx, p.m, p.imp, view, sets)
	if err != nil {
		return err
	}
	if n := keyCount(sets); n > 0 {
		p.perKey = time.Since(start) / time.Duration(n)
	}
	if err := p.imp.Verify(ctx, compared(p.imp.State().Compared, found)); err != nil {
		return err
	}
	p.v.o.log.Debug("transfer: compared", "move", p.m.ID, "tenant", p.m.Tenant, "position", view.Position(), "sets", len(sets), "took", time.Since(start))
	return p.v.o.fault("verified")
}

// catchUp applies changes until the lag is short, compares the keys that changed as long
// as they are many, and leaves a run behind for Finish.
func (p *preparing) catchUp(ctx context.Context) (out cells.Prediction, err error) {
	began := time.Now()
	// The run outlives this call if it is left for Finish.
	r := follow(context.WithoutCancel(ctx), p.m, p.src, p.imp)
	defer func() {
		if err != nil && p.imp != nil {
			_ = r.stop()
			<-r.ended
		}
	}()
	lag, n, asked, err := p.rounds(ctx, r)
	if err != nil {
		return out, err
	}
	var left int64
	for before, round := int64(1)<<50, 0; ; round++ {
		if left, err = touched(ctx, r); err != nil {
			return out, err
		}
		// Each comparison takes less time than the one before, and fewer keys change in it.
		if left <= p.v.o.touched || left >= before*4/5 || round == maxSettles {
			break
		}
		before = left
		if err := p.settle(ctx, r, left); err != nil {
			return out, err
		}
		if lag, n, asked, err = p.round(ctx, r); err != nil {
			return out, err
		}
	}
	watch := stopwatch{last: time.Now()}
	if _, err := p.src.Check(ctx, p.m, p.watch.limits); err != nil {
		return out, err
	}
	watch.lap("check")
	if err := r.call(ctx, func(imp Import) error { return imp.Unlock(ctx) }); err != nil {
		return out, err
	}
	watch.lap("unlock")
	p.v.o.log.Debug("transfer: prepared", append([]any{"move", p.m.ID, "tenant", p.m.Tenant, "lag", lag, "keys", left}, watch.laps...)...)
	changes, busy := r.counts()
	out = p.predict(lag, n, left, changes, asked, busy)
	out.WriteRate = float64(changes) / max(time.Since(began), time.Millisecond).Seconds()
	p.imp = nil
	if p.v.o.follow > 0 {
		p.v.leave(r)
	} else {
		p.v.end(r)
	}
	return out, p.v.o.fault("prepared")
}

// maxSettles bounds how often keys are compared before the cut.
const maxSettles = 8

// rounds waits until the changes committed up to a question are applied within
// the wanted lag, and gives up trying when that gets no better. It returns what the
// last round does.
func (p *preparing) rounds(ctx context.Context, r *run) (lag time.Duration, changes int64, asked time.Duration, err error) {
	best, stale := time.Duration(1<<62), 0
	for {
		if lag, changes, asked, err = p.round(ctx, r); err != nil || lag <= p.v.o.lag {
			return lag, changes, asked, err
		}
		if lag < best*9/10 {
			best, stale = lag, 0
		} else if stale++; stale >= 5 {
			return lag, changes, asked, nil
		}
	}
}

// round waits until the changes committed up to a question are applied. It returns the
// time from the question on, the changes in it, and the time that the answer took.
func (p *preparing) round(ctx context.Context, r *run) (lag time.Duration, changes int64, asked time.Duration, err error) {
	before, _ := r.counts()
	start := time.Now()
	head, err := p.src.Head(ctx, p.m)
	if err != nil {
		return 0, 0, 0, err
	}
	asked = time.Since(start)
	if err := r.wait(ctx, head); err != nil {
		return 0, 0, 0, err
	}
	lag = time.Since(start)
	after, _ := r.counts()
	changes = after - before
	p.v.o.log.Debug("transfer: caught up", "move", p.m.ID, "tenant", p.m.Tenant, "lag", lag, "changes", changes)
	p.progress(cells.Progress{Phase: "catchup", Done: after, Left: lag})
	return lag, changes, asked, nil
}

// predict says what the cut will take: the last round is what it repeats, then
// the keys that changed are compared.
func (p *preparing) predict(lag time.Duration, n, touched, changes int64, asked, busy time.Duration) cells.Prediction {
	perKey := p.perKey
	if perKey == 0 {
		perKey = 20 * time.Microsecond
	}
	apply := time.Duration(0)
	if changes > 0 {
		apply = busy / time.Duration(changes) * time.Duration(n)
	}
	return cells.Prediction{Pause: p.v.o.steps + max(lag, asked+apply) + time.Duration(touched)*perKey + asked, LagChanges: n}
}
