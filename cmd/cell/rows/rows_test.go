// SPDX-License-Identifier: Apache-2.0

package rows

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/internal/pgcluster"
)

func TestCopy(t *testing.T) {
	if _, err := pgcluster.BinDir(); err != nil {
		t.Skip(err)
	}
	rep, err := Bench{Rows: 3000, Size: 100, Rounds: 2, Log: slog.New(slog.DiscardHandler), OnStep: func(string) {}}.Copy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(rep.Moves) != 2 || len(rep.Peer) != 2 {
		t.Fatalf("%+v", rep)
	}
	for _, x := range append(rep.Moves, rep.Peer...) {
		if x.Copied <= 0 || x.Copied > x.Whole {
			t.Errorf("the rows took %v of %v", x.Copied, x.Whole)
		}
	}
}

func TestCatchUp(t *testing.T) {
	if _, err := pgcluster.BinDir(); err != nil {
		t.Skip(err)
	}
	rep, err := Bench{Rows: 500, Size: 100, Rounds: 2, Log: slog.New(slog.DiscardHandler), OnStep: func(string) {}}.CatchUp(t.Context(), 300)
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range [][]Catching{rep.Move, rep.Native, rep.Decode} {
		if len(way) != 2 || way[0].Took <= 0 || way[1].Took <= 0 {
			t.Errorf("%+v", rep)
		}
	}
}

func TestTreeTime(t *testing.T) {
	if _, err := treeTime(1 << 30); err == nil {
		t.Error("a process that is not there has taken time")
	}
	for deadline := time.Now().Add(time.Minute); ; {
		took, err := treeTime(os.Getpid())
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("%v, %v", took, err)
		}
		if took > 0 {
			return
		}
	}
}
