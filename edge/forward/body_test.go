// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
)

func readAll(t *testing.T, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestBodyReplaysWhatWasRead(t *testing.T) {
	const text = "the quick brown fox jumps over the lazy dog"
	for name, read := range map[string]int{"nothing": 0, "part": 10, "all": len(text)} {
		t.Run(name, func(t *testing.T) {
			ends := 0
			budget := NewBudget(1 << 20)
			b := NewBody(iotest.OneByteReader(strings.NewReader(text)), -1, 100, budget, func() { ends++ })
			first := b.Attempt()
			if _, err := io.ReadFull(first, make([]byte, read)); err != nil {
				t.Fatal(err)
			}
			if !b.Replayable() || b.Recorded() != int64(read) {
				t.Fatalf("replayable %v, recorded %d", b.Replayable(), b.Recorded())
			}
			second := b.Attempt()
			if _, err := first.Read(make([]byte, 1)); !errors.Is(err, ErrAbandoned) {
				t.Fatalf("the first attempt goes on: %v", err)
			}
			if got := readAll(t, iotest.OneByteReader(second)); got != text {
				t.Fatalf("got %q", got)
			}
			if got := readAll(t, b.Attempt()); got != text {
				t.Fatalf("third: %q", got)
			}
			b.Close()
			if ends != 1 || budget.Used() != 0 {
				t.Fatalf("ends %d, budget %d", ends, budget.Used())
			}
		})
	}
}

func TestBodyPastLimitGoesOnButOnce(t *testing.T) {
	text := strings.Repeat("x", 1000)
	budget := NewBudget(1 << 20)
	b := NewBody(strings.NewReader(text), -1, 999, budget, nil)
	defer b.Close()
	if got := readAll(t, b.Attempt()); got != text {
		t.Fatalf("%d bytes", len(got))
	}
	if b.Replayable() || b.Attempt() != nil || budget.Used() != 0 {
		t.Fatal("a lost body can be replayed")
	}
}

func TestBodyBudgetIsShared(t *testing.T) {
	budget := NewBudget(8192)
	text := strings.Repeat("x", 5000)
	a, b := NewBody(strings.NewReader(text), -1, 1<<20, budget, nil), NewBody(strings.NewReader(text), -1, 1<<20, budget, nil)
	defer b.Close()
	if readAll(t, a.Attempt()) != text || readAll(t, b.Attempt()) != text {
		t.Fatal("the bodies are not whole")
	}
	if !a.Replayable() || b.Replayable() {
		t.Fatal("the budget does not bound")
	}
	a.Close()
	if budget.Used() != 0 {
		t.Fatal(budget.Used())
	}
}

func TestBodyCommit(t *testing.T) {
	budget := NewBudget(1 << 20)
	b := NewBody(iotest.OneByteReader(strings.NewReader("0123456789")), -1, 100, budget, nil)
	if _, err := io.ReadFull(b.Attempt(), make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	second := b.Attempt()
	if _, err := io.ReadFull(second, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	b.Commit() // in the middle of the record
	if b.Replayable() || b.Attempt() != nil {
		t.Fatal("replayable after the commit")
	}
	_ = second
	b2 := NewBody(strings.NewReader("0123456789"), -1, 100, budget, nil)
	only := b2.Attempt()
	b2.Commit()
	if got := readAll(t, only); got != "0123456789" || b2.Recorded() != 0 {
		t.Fatalf("%q, recorded %d", got, b2.Recorded())
	}
	b.Close()
	b2.Close()
	if budget.Used() != 0 {
		t.Fatal(budget.Used())
	}
}

func TestBodySourceError(t *testing.T) {
	boom := errors.New("boom")
	b := NewBody(io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(boom)), -1, 100, nil, nil)
	for range 2 {
		got, err := io.ReadAll(b.Attempt())
		if string(got) != "abc" || !errors.Is(err, boom) || !errors.Is(b.Err(), boom) {
			t.Fatalf("%q %v %v", got, err, b.Err())
		}
	}
}

// An attempt that is stuck in a read of the client must not delay or rob the next.
func TestBodyAbandonedReadLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		b := NewBody(pr, -1, 100, nil, nil)
		first := b.Attempt()
		firstErr := make(chan error, 1)
		go func() {
			_, err := first.Read(make([]byte, 10))
			firstErr <- err
		}()
		synctest.Wait() // the first attempt reads
		second := b.Attempt()
		if err := <-firstErr; !errors.Is(err, ErrAbandoned) {
			t.Fatal(err)
		}
		got := make(chan string, 1)
		go func() {
			all, err := io.ReadAll(second)
			if err != nil {
				t.Error(err)
			}
			got <- string(all)
		}()
		synctest.Wait() // the second waits for its turn
		for _, s := range []string{"hello ", "world"} {
			if _, err := pw.Write([]byte(s)); err != nil {
				t.Fatal(err)
			}
		}
		pw.Close()
		if s := <-got; s != "hello world" {
			t.Fatalf("got %q", s)
		}
	})
}

// A commit or a loss in the middle of a replay keeps what the attempt still needs.
func TestBodyReplayOutlivesItsRecord(t *testing.T) {
	for name, limit := range map[string]int{"committed": 100, "lost": 6} {
		b := NewBody(iotest.OneByteReader(strings.NewReader("0123456789")), 10, limit, nil, nil)
		if _, err := io.ReadFull(b.Attempt(), make([]byte, 6)); err != nil {
			t.Fatal(err)
		}
		second := b.Attempt()
		if _, err := io.ReadFull(second, make([]byte, 2)); err != nil {
			t.Fatal(err)
		}
		if b.Finished() {
			t.Fatal("finished too early")
		}
		if name == "committed" {
			b.Commit()
		}
		if got := readAll(t, second); got != "23456789" || !b.Finished() || b.Attempt() != nil {
			t.Fatalf("%s: %q", name, got)
		}
		b.Close()
	}
}

// Closing ends a read that waits for the client, and says that it was under way.
func TestBodyCloseWhileReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		b := NewBody(pr, -1, 100, nil, nil)
		at := b.Attempt()
		got := make(chan error, 1)
		go func() {
			_, err := at.Read(make([]byte, 10))
			got <- err
		}()
		synctest.Wait()
		if !b.Close() {
			t.Error("no read was under way")
		}
		if err := <-got; !errors.Is(err, ErrAbandoned) {
			t.Error(err)
		}
		pw.Close()
	})
}

// Random reads, abandonments and sources against the plain bytes.
func TestBodyRandom(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		text := make([]byte, rnd.IntN(300))
		for i := range text {
			text[i] = byte(rnd.IntN(256))
		}
		limit := rnd.IntN(400)
		var src io.Reader = bytes.NewReader(text)
		if rnd.IntN(2) == 0 {
			src = iotest.DataErrReader(src)
		}
		b := NewBody(src, -1, limit, nil, nil)
		for {
			at := b.Attempt()
			if at == nil {
				if b.Read() <= int64(limit) {
					t.Fatalf("seed %d: lost %d bytes under the limit of %d", seed, b.Read(), limit)
				}
				break
			}
			var got []byte
			ended := false
			for steps := rnd.IntN(20); steps >= 0 && !ended; steps-- {
				p := make([]byte, rnd.IntN(40))
				n, err := at.Read(p)
				got = append(got, p[:n]...)
				ended = err == io.EOF
				if err != nil && !ended {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
			if !bytes.HasPrefix(text, got) || ended && len(got) != len(text) {
				t.Fatalf("seed %d: got %d bytes of %d, ended %v", seed, len(got), len(text), ended)
			}
			if ended && rnd.IntN(2) == 0 {
				break
			}
		}
		b.Close()
	}
}
