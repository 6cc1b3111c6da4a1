// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// counted counts its surveys.
type counted struct {
	Source
	Sink
	n int64
}

func (c *counted) Survey(context.Context, cells.TenantID) (Survey, error) {
	c.n++
	return Survey{Tables: []TableInfo{{Rows: c.n}}}, nil
}

// TestPreflightsSurveyIsTaken: the preparation behind a preflight does not ask the store
// again; a preflight always does, and so does whoever comes later or for another move.
func TestPreflightsSurveyIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counted{}
		v := New(c, c)
		m := testMove
		ctx := ContextForMove(t.Context(), m)
		other := m
		other.Target = "c"
		ask := func(what string, f func() (Survey, error), want int64) {
			t.Helper()
			if s, err := f(); err != nil || s.Tables[0].Rows != want || c.n < want {
				t.Errorf("%s: survey %+v of %d, %v, want the %d.", what, s, c.n, err, want)
			}
		}
		preflight := func() (Survey, error) { return v.Survey(ctx, "t") }
		prepare := func() (Survey, error) { return v.surveyed(ctx, "t") }
		source := func() (Survey, error) { return v.Source().Survey(ctx, "t") }
		ask("preflight", preflight, 1)
		ask("preflight again", preflight, 2)
		ask("preparation of another tenant", func() (Survey, error) { return v.surveyed(ctx, "u") }, 3)
		ask("preparation of another move", func() (Survey, error) { return v.surveyed(ContextForMove(ctx, other), "t") }, 4)
		ask("preparation in a group", func() (Survey, error) { return v.surveyed(ContextWithGroup(ctx, "g"), "t") }, 5)
		ask("preparation", prepare, 2)
		ask("preparation again", prepare, 6)
		ask("preflight", preflight, 7)
		ask("the source of a preparation", source, 7)
		ask("the source again", source, 8)
		ask("preflight", preflight, 9)
		<-time.After(surveyAge)
		ask("preparation, later", prepare, 10)
		ask("no move", func() (Survey, error) { return v.Survey(t.Context(), "t") }, 11)
		ask("no move again", func() (Survey, error) { return v.Source().Survey(t.Context(), "t") }, 12)
		for i := range 3 * maxAsked {
			if _, err := v.Survey(ctx, cells.TenantID(fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
			if n := len(v.asked.of); n > maxAsked {
				t.Fatalf("%d surveys are kept", n)
			}
		}
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	})
}
