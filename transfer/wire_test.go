// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestFrames(t *testing.T) {
	var buf bytes.Buffer
	big := bytes.Repeat([]byte{7}, 3<<20)
	for _, f := range []struct {
		kind   byte
		header any
		data   []byte
	}{{frameBatch, Batch{Table: "t", Count: 3, LastKey: []byte{0}, Upto: "0000000000000001", End: true}, big}, {frameAlive, nil, nil}, {frameError, wireError{Kind: "fenced"}, nil}, {frameEnd, nil, nil}} {
		if err := writeFrame(&buf, f.kind, f.header, f.data); err != nil {
			t.Fatal(err)
		}
	}
	whole := buf.Bytes()
	r := bufio.NewReader(bytes.NewReader(whole))
	for _, want := range []byte{frameBatch, frameAlive, frameError, frameEnd} {
		kind, _, data, err := readFrame(r)
		if err != nil || kind != want || kind == frameBatch && !bytes.Equal(data, big) {
			t.Fatalf("frame %q: got %q, %d bytes, %v", want, kind, len(data), err)
		}
	}
	if _, _, _, err := readFrame(r); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("end of a stream without an end: %v", err)
	}
	for _, cut := range []int{1, frameHead, frameHead + 3, len(whole) / 2} {
		if _, _, _, err := readFrame(bufio.NewReader(bytes.NewReader(whole[:cut]))); !errors.Is(err, cells.ErrUnavailable) {
			t.Errorf("cut at %d: %v", cut, err)
		}
	}
	var huge [frameHead]byte
	huge[0] = frameBatch
	binary.BigEndian.PutUint32(huge[5:], maxData+1)
	if _, _, _, err := readFrame(bufio.NewReader(bytes.NewReader(huge[:]))); !errors.Is(err, ErrTooLarge) {
		t.Errorf("huge frame: %v", err)
	}
	if err := writeFrame(io.Discard, frameBatch, nil, make([]byte, maxData+1)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("writing a huge frame: %v", err)
	}
}

func FuzzReadFrame(f *testing.F) {
	var buf bytes.Buffer
	_ = writeFrame(&buf, frameBatch, Batch{Table: "t"}, []byte("data"))
	f.Add(buf.Bytes())
	f.Add([]byte{frameBatch, 0, 0, 0, 1, 3, 0xff, 0xff, 0xff, 'x'})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bufio.NewReader(bytes.NewReader(in))
		for {
			_, header, data, err := readFrame(r)
			if err != nil {
				return
			}
			if len(header)+len(data) > len(in) {
				t.Fatalf("%d bytes out of %d", len(header)+len(data), len(in))
			}
		}
	})
}

func TestErrorsKeepTheirMeaning(t *testing.T) {
	for _, k := range kinds {
		err := fmt.Errorf("at the other side: %w", k.err)
		got := &wireError{Kind: kindOf(err), Message: err.Error()}
		if !errors.Is(got, k.err) || got.Error() != err.Error() {
			t.Errorf("%s: %v", k.kind, got)
		}
	}
	if got := (&wireError{Kind: kindOf(io.EOF)}); errors.Is(got, cells.ErrUnavailable) || got.Unwrap() != nil {
		t.Errorf("an error without a meaning got one: %v", got.Unwrap())
	}
	if !errors.Is(ErrViewLost, cells.ErrUnavailable) || !retryable(&wireError{Kind: "view_lost"}) {
		t.Error("a lost view cannot be opened again")
	}
}

// fake is a source that answers as told.
type fake struct {
	Source
	changes func(ctx context.Context, yield func(Batch) error) error
	closed  chan struct{}
}

func (f *fake) Head(context.Context, cells.MoveRef) (Position, error) { return MakePosition(9), nil }

func (f *fake) Changes(ctx context.Context, _ cells.MoveRef, _ Position, yield func(Batch) error) error {
	return f.changes(ctx, yield)
}

func (f *fake) View(context.Context, cells.MoveRef) (View, error) { return &fakeView{f: f}, nil }

func (f *fake) Check(_ context.Context, _ cells.MoveRef, l Limits) (Health, error) {
	h := Health{Retained: l.MaxRetained - 1, ReplicaLag: l.MaxReplicaLag, Blockers: []Blocker{{PID: 7, User: "u", Began: time.Unix(1e9, 0).UTC(), Age: time.Minute}}}
	return h, l.Check("a", h.Retained+1<<20)
}

// Survey implements Source: it names what it was asked about.
func (f *fake) Survey(ctx context.Context, t cells.TenantID) (Survey, error) {
	m := MoveOf(ctx)
	return Survey{Engine: fmt.Sprint(t, " ", m.Source, " ", m.Target, " ", GroupOf(ctx))}, nil
}

// TestSurveyOfMove: whether the move is of a group reaches the source, and so does the
// pair of cells; nothing else of the move does.
func TestSurveyOfMove(t *testing.T) {
	_, src := serve(t, &fake{})
	m := testMove
	m.Source, m.Target = "from", "to"
	out, err := src.Survey(ContextForMove(ContextWithGroup(t.Context(), "g1"), m), m.Tenant)
	if want := string(m.Tenant) + " from to g1"; err != nil || out.Engine != want {
		t.Errorf("surveyed %q, %v, want %q", out.Engine, err, want)
	}
	if out, err = src.Survey(t.Context(), m.Tenant); err != nil || out.Engine != string(m.Tenant)+"   " {
		t.Errorf("of no move: %q, %v", out.Engine, err)
	}
	if _, err = src.Survey(ContextWithGroup(t.Context(), "a b"), m.Tenant); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a malformed group: %v", err)
	}
}

// TestCheck: limits reach the source, and what it says reaches the target.
func TestCheck(t *testing.T) {
	_, src := serve(t, &fake{})
	if _, err := src.Check(t.Context(), testMove, Limits{MaxRetained: 5}); !errors.Is(err, ErrRetention) || !errors.Is(err, cells.ErrInvalid) || retryable(err) || !fatal(err) {
		t.Errorf("too much: %v", err)
	}
	h, err := src.Check(t.Context(), testMove, Limits{MaxRetained: -1, MaxReplicaLag: time.Second})
	if err != nil || h.Retained != -2 || h.ReplicaLag != time.Second || len(h.Blockers) != 1 {
		t.Fatalf("%+v, %v", h, err)
	}
	if got, want := h.Blockers[0].String(), "pid 7 (user u), open for 1m0s since 2001-09-09 01:46:40"; got != want {
		t.Errorf("blocker %q, want %q", got, want)
	}
	if l := (Limits{}).Retained(); l != DefaultMaxRetained {
		t.Errorf("the default is %d", l)
	}
	if err := (Limits{MaxReplicaLag: -1}).Validate(); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a negative lag: %v", err)
	}
}

type fakeView struct {
	View
	f *fake
}

func (v *fakeView) Position() Position { return MakePosition(7) }
func (v *fakeView) Close() error       { close(v.f.closed); return nil }
func (v *fakeView) Digests(ctx context.Context, _ []KeySet) ([]Digest, error) {
	if PlainDigests(ctx) {
		return []Digest{{Table: "t", Rows: 1, Sum: "s"}}, nil
	}
	return []Digest{{Table: "t", Rows: 1, Sum: "h:s"}}, nil
}

func (v *fakeView) Rows(ctx context.Context, table string, _ []byte, yield func(Batch) error) error {
	b := Batch{Table: table, End: true}
	if BinaryRows(ctx) {
		b.Form = FormBinary
	}
	return yield(b)
}

var testMove = cells.MoveRef{ID: "m1", Tenant: "t", Source: "a", Target: "b", Base: 1}

func serve(t *testing.T, src Source) (*httptest.Server, Source) {
	t.Helper()
	h := Handler(src, func(r *http.Request, m cells.MoveRef) error {
		if m.Tenant != "t" {
			return cells.ErrFenced
		}
		return nil
	})
	s := httptest.NewServer(h)
	tr := &http.Transport{}
	t.Cleanup(func() { tr.CloseIdleConnections(); s.Close(); _ = h.(io.Closer).Close() })
	return s, NewRemoteSource(&http.Client{Transport: tr}, []string{s.URL + "/"})
}

func TestStream(t *testing.T) {
	f := &fake{changes: func(ctx context.Context, yield func(Batch) error) error {
		for i := range 100 {
			if err := yield(Batch{Data: []byte{byte(i)}, Count: 1, Upto: MakePosition(uint64(i)), End: true}); err != nil {
				return err
			}
		}
		return cells.ErrStaleOrder
	}}
	_, src := serve(t, f)
	n := 0
	err := src.Changes(t.Context(), testMove, "", func(b Batch) error {
		if b.Data[0] != byte(n) || b.Upto != MakePosition(uint64(n)) {
			t.Fatalf("batch %d: %+v", n, b)
		}
		n++
		return nil
	})
	if n != 100 || !errors.Is(err, cells.ErrStaleOrder) {
		t.Fatalf("%d batches, then %v", n, err)
	}
	// An error of the reader comes back as it is, and ends the source's side.
	ended := make(chan struct{})
	f.changes = func(ctx context.Context, yield func(Batch) error) error {
		defer close(ended)
		for ctx.Err() == nil {
			if err := yield(Batch{Data: make([]byte, 1<<16)}); err != nil {
				return err
			}
		}
		return ctx.Err()
	}
	own := errors.New("own")
	if err := src.Changes(t.Context(), testMove, "", func(Batch) error { return own }); !errors.Is(err, own) {
		t.Errorf("error of the reader: %v", err)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("the source's side goes on")
	}
}

// TestBackpressure: a reader that does not read stops the source within a bound.
func TestBackpressure(t *testing.T) {
	sent := make(chan struct{}, 100000)
	f := &fake{changes: func(ctx context.Context, yield func(Batch) error) error {
		for {
			if err := yield(Batch{Data: make([]byte, 1<<20), Count: 1}); err != nil {
				return err
			}
			sent <- struct{}{}
		}
	}}
	_, src := serve(t, f)
	stop := errors.New("stop")
	err := src.Changes(t.Context(), testMove, "", func(Batch) error {
		// The source fills what is between, then stands.
		still, last := 0, -1
		for still < 20 {
			if n := len(sent); n == last {
				still++
			} else {
				still, last = 0, n
			}
			<-time.After(10 * time.Millisecond)
		}
		if last > 64 {
			t.Errorf("%d MiB are under way to a reader that does not read", last)
		}
		return stop
	})
	if !errors.Is(err, stop) {
		t.Fatal(err)
	}
}

func TestHandlerRefuses(t *testing.T) {
	f := &fake{closed: make(chan struct{})}
	s, src := serve(t, f)
	for name, c := range map[string]struct {
		path, body string
		status     int
	}{
		"not json":      {"head", "{", 400},
		"unknown field": {"head", `{"x":1}`, 400},
		"no move":       {"head", `{}`, 400},
		"bad tenant":    {"head", `{"move":{"id":"m","tenant":"a b","source":"a","target":"b"}}`, 400},
		"own target":    {"head", `{"move":{"id":"m","tenant":"t","source":"a","target":"a"}}`, 400},
		"not allowed":   {"head", `{"move":{"id":"m","tenant":"u","source":"a","target":"b"}}`, 403},
		"unknown call":  {"rows", `{"move":{"id":"m","tenant":"t","source":"a","target":"b"}}`, 404},
		"unknown view":  {"view/rows", `{"move":{"id":"m","tenant":"t","source":"a","target":"b"},"view":"x"}`, 410},
		"too large":     {"head", `{"move":{"id":"` + strings.Repeat("m", maxBody) + `"}}`, 400},
	} {
		resp, err := http.Post(s.URL+PathTransfer+c.path, "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.status {
			t.Errorf("%s: %s, want %d", name, resp.Status, c.status)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	// A view is known to its own move only, and freed by its release or close.
	v, err := src.View(t.Context(), testMove)
	if err != nil || v.Position() != MakePosition(7) {
		t.Fatal(v, err)
	}
	stolen := *v.(*remoteView)
	stolen.move.ID = "m2"
	if _, err := stolen.Digests(t.Context(), []KeySet{{Table: "t"}}); !errors.Is(err, ErrViewLost) {
		t.Errorf("a view of another move: %v", err)
	}
	if ds, err := v.Digests(t.Context(), []KeySet{{Table: "t"}}); err != nil || len(ds) != 1 {
		t.Errorf("digests: %v, %v", ds, err)
	}
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	<-f.closed
	if _, err := v.Digests(t.Context(), []KeySet{{Table: "t"}}); !errors.Is(err, ErrViewLost) {
		t.Errorf("a closed view: %v", err)
	}
}

func TestNextProcessIsTried(t *testing.T) {
	f := &fake{}
	s, _ := serve(t, f)
	dead := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(dead.Close)
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	src := NewRemoteSource(&http.Client{Transport: tr}, []string{"http://127.0.0.1:1", dead.URL, s.URL})
	for range 2 {
		if pos, err := src.Head(t.Context(), testMove); err != nil || pos != MakePosition(9) {
			t.Fatalf("%v, %v", pos, err)
		}
	}
	src = NewRemoteSource(&http.Client{Transport: tr}, []string{"http://127.0.0.1:1", dead.URL})
	if _, err := src.Head(t.Context(), testMove); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("all dead: %v", err)
	}
}

func TestPositions(t *testing.T) {
	last := Position("")
	for _, n := range []uint64{0, 1, 15, 16, 1 << 32, 1<<64 - 1} {
		p := MakePosition(n)
		if got, err := p.Number(); err != nil || got != n || p <= last {
			t.Errorf("%d: %s after %s, %d, %v", n, p, last, got, err)
		}
		last = p
	}
	for _, bad := range []Position{"1", "0000000000000000x", "zzzzzzzzzzzzzzzz"} {
		if _, err := bad.Number(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestStaleAt(t *testing.T) {
	for _, c := range []struct {
		f     guard.Fence
		stale bool
	}{
		{guard.Fence{}, false}, {guard.Fence{Epoch: 1, Open: true}, false}, {guard.Fence{Epoch: 2, Move: "m1"}, false},
		{guard.Fence{Epoch: 2, Open: true, Move: "m1"}, true}, {guard.Fence{Epoch: 2, Move: "m2"}, true}, {guard.Fence{Epoch: 3, Move: "m1"}, true},
	} {
		if err := StaleAt(c.f, testMove); errors.Is(err, cells.ErrStaleOrder) != c.stale {
			t.Errorf("%+v: %v", c.f, err)
		}
	}
}

func TestPace(t *testing.T) {
	o := defaults()
	p := o.pacer(ContextWithRate(t.Context(), 1000))
	start := time.Now()
	for range 4 {
		if err := p.wait(t.Context(), 60); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(start); d < 100*time.Millisecond {
		t.Errorf("240 rows at 1000 a second took %v", d)
	}
	if err := o.pacer(t.Context()).wait(t.Context(), 1<<40); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.wait(ctx, 1000); err == nil {
		t.Error("waited past the end of its context")
	}
}
