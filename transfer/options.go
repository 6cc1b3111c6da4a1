// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/time/rate"
)

// Option configures a Mover; see [New].
type Option func(*options)

type options struct {
	rows      int
	batchRows int
	viewAge   time.Duration
	follow    time.Duration
	lag       time.Duration
	touched   int64
	undoRows  int64
	steps     time.Duration
	check     time.Duration
	log       *slog.Logger
	faults    func(point string) error
}

func defaults() options {
	return options{batchRows: 5000, viewAge: 10 * time.Minute, follow: time.Minute, lag: 60 * time.Millisecond,
		touched: 200, undoRows: 200_000, steps: 25 * time.Millisecond, check: 2 * time.Second, log: slog.New(slog.DiscardHandler)}
}

// WithRowsPerSecond throttles copies and removals; 0, the default, is unlimited.
// A context made by [ContextWithRate] overrides it.
func WithRowsPerSecond(n int) Option { return func(o *options) { o.rows = n } }

// WithRemoveBatch bounds the rows that one transaction of a removal deletes;
// default 5000.
func WithRemoveBatch(rows int) Option { return func(o *options) { o.batchRows = max(1, rows) } }

// WithViewAge bounds how long one view of the source is read while copying: the
// store cannot clean up behind it. The copy goes on with a new view at a later
// position. Default 10 minutes.
func WithViewAge(d time.Duration) Option { return func(o *options) { o.viewAge = d } }

// WithFollow is how long a prepared move goes on applying changes while it waits
// for Finish; default 1 minute, 0 turns it off. Finish is correct without it, and slower.
func WithFollow(d time.Duration) Option { return func(o *options) { o.follow = d } }

// WithLag is the catch-up time below which a cut is worth it; default 60 ms.
func WithLag(d time.Duration) Option { return func(o *options) { o.lag = d } }

// WithTouchedLimit is the number of changed keys above which Prepare compares
// them before the cut, rather than in it, as long as that leaves fewer of them;
// default 200.
func WithTouchedLimit(n int64) Option { return func(o *options) { o.touched = n } }

// WithUndoCompare is the number of rows up to which an undo compares everything
// before its cut, as a copy does; above it only what changed since the move that it
// undoes. Default 200,000.
func WithUndoCompare(rows int64) Option { return func(o *options) { o.undoRows = rows } }

// WithStepCost is the time that the steps of a cut outside this package take
// together; it is added to predictions. Default 25 ms.
func WithStepCost(d time.Duration) Option { return func(o *options) { o.steps = d } }

// WithCheckEvery is how often a move that is being prepared looks at what it costs, and
// what it waits for; see [Limits] and [Health]. Default 2 s.
func WithCheckEvery(d time.Duration) Option { return func(o *options) { o.check = d } }

// WithLogger sets the log; default none.
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// WithFault calls f at each point where a crash would leave something behind: an
// error ends the step there. For tests.
func WithFault(f func(point string) error) Option { return func(o *options) { o.faults = f } }

type rateKey struct{}

// ContextWithRate throttles what is called with the context to a number of rows
// per second; 0 is unlimited.
func ContextWithRate(ctx context.Context, rowsPerSecond int) context.Context {
	return context.WithValue(ctx, rateKey{}, rowsPerSecond)
}

// RateOf returns what [ContextWithRate] has set, if it was called.
func RateOf(ctx context.Context) (rowsPerSecond int, ok bool) {
	rowsPerSecond, ok = ctx.Value(rateKey{}).(int)
	return rowsPerSecond, ok
}

// pacer waits so that rows flow at a bounded rate.
type pacer struct{ l *rate.Limiter }

func (o *options) pacer(ctx context.Context) pacer {
	n, ok := RateOf(ctx)
	if !ok {
		n = o.rows
	}
	if n <= 0 {
		return pacer{}
	}
	return pacer{rate.NewLimiter(rate.Limit(n), max(1, n/10))}
}

func (p pacer) wait(ctx context.Context, rows int64) error {
	if p.l == nil {
		return nil
	}
	for rows > 0 {
		n := min(rows, int64(p.l.Burst()))
		if err := p.l.WaitN(ctx, int(n)); err != nil {
			return err
		}
		rows -= n
	}
	return nil
}

func (o *options) fault(point string) error {
	if o.faults == nil {
		return nil
	}
	return o.faults(point)
}
