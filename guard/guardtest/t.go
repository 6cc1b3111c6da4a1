// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
)

// T is what the suite needs of a test. [Wrap] makes one of a *testing.T;
// [Record] runs with one that keeps failures to itself.
type T interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	// Fatalf ends the goroutine that runs the test; call it from no other.
	Fatalf(format string, args ...any)
	Failed() bool
	Context() context.Context
	Run(name string, f func(T)) bool
}

// Wrap makes a T of a test.
func Wrap(t *testing.T) T { return wrapped{t} }

type wrapped struct{ *testing.T }

func (w wrapped) Run(name string, f func(T)) bool {
	return w.T.Run(name, func(t *testing.T) { f(wrapped{t}) })
}

// Report is what a recorded run found.
type Report struct {
	mu       sync.Mutex
	Failures []string
}

// Failed reports whether the suite found a fault.
func (r *Report) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.Failures) > 0
}

// Record runs f with a T whose failures end in the report. After the first
// failure no further subtest is run.
func Record(ctx context.Context, f func(T)) *Report {
	r := &Report{}
	(&recorder{report: r, ctx: ctx}).Run("", f)
	return r
}

type recorder struct {
	report *Report
	ctx    context.Context
	name   string
}

func (r *recorder) Helper()             {}
func (r *recorder) Logf(string, ...any) {}

func (r *recorder) Errorf(format string, args ...any) {
	r.report.mu.Lock()
	defer r.report.mu.Unlock()
	r.report.Failures = append(r.report.Failures, r.name+": "+fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Failed() bool             { return r.report.Failed() }
func (r *recorder) Context() context.Context { return r.ctx }

func (r *recorder) Run(name string, f func(T)) bool {
	if r.Failed() {
		return false
	}
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	sub := &recorder{report: r.report, ctx: ctx, name: r.name + "/" + name}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(sub)
	}()
	<-done
	return !r.Failed()
}
