// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Two jobs run until a move cancels them, in either cell; all are done once, where
// the tenant is then.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var begun [3]atomic.Int64 // of the jobs that do not end by themselves the first time
	var wrong atomic.Value
	work := func(ctx context.Context, tenant cells.TenantID, id int64) error {
		if id != 21 && id != 41 {
			return nil
		}
		if begun[id/20].Add(1) > 1 {
			return nil
		}
		<-ctx.Done()
		a := cells.AnswerOf(context.Cause(ctx))
		if a == nil || !errors.Is(a, cells.ErrGateClosed) || a.Code != cells.CodeMoving || a.Tenant != tenant {
			wrong.Store(context.Cause(ctx))
		}
		return context.Cause(ctx)
	}
	var out bytes.Buffer
	if err := run(ctx, &out, work); err != nil {
		t.Fatal(err)
	}
	if w := wrong.Load(); w != nil {
		t.Errorf("a job was cancelled with %v", w)
	}
	if want := "60 jobs done once, 0 more than once, 0 left; 2 were interrupted"; !strings.HasPrefix(out.String(), want) {
		t.Errorf("%s, want %s", out.String(), want)
	}
	if begun[1].Load() != 2 || begun[2].Load() != 2 {
		t.Errorf("the jobs that were interrupted were begun %d and %d times", begun[1].Load(), begun[2].Load())
	}
}

// A job that ends as if nothing had happened cannot write any more under the context
// that has ended: it is begun again in the other cell, and counts once.
func TestStubbornJob(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var begun atomic.Int64
	work := func(ctx context.Context, _ cells.TenantID, id int64) error {
		if id == 21 && begun.Add(1) == 1 {
			<-ctx.Done()
			return nil // as if nothing had happened
		}
		return nil
	}
	var out bytes.Buffer
	if err := run(ctx, &out, work); err != nil {
		t.Fatal(err)
	}
	if want := "60 jobs done once, 0 more than once, 0 left; 0 were interrupted"; !strings.HasPrefix(out.String(), want) || begun.Load() != 2 {
		t.Errorf("%s, want %s; begun %d times", out.String(), want, begun.Load())
	}
}
