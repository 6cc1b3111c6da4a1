// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

const childEnv = "TRANSFERTEST_CHILD"

// Child is the other process of the suite. The TestMain of a package that calls
// [Run] calls it first; it returns false in the process of the tests. Otherwise it
// carries out one step of a move, writes a line for each point that it passes,
// and returns true when the process should end with the code.
func Child(h Harness) (code int, child bool) {
	args := strings.Split(os.Getenv(childEnv), "\x1f")
	if len(args) != 4 || h.Reopen == nil || args[0] != h.Engine {
		return 0, false
	}
	ctx := context.Background()
	err := func() error {
		a, err := h.Reopen(ctx, "cell-a", args[2])
		if err != nil {
			return err
		}
		b, err := h.Reopen(ctx, "cell-b", args[3])
		if err != nil {
			return err
		}
		m := cells.MoveRef{ID: "m1", Tenant: tenant, Source: a.ID(), Target: b.ID(), Base: base}
		var at int
		in := bufio.NewReader(os.Stdin)
		o := transfer.WithFault(func(p string) error {
			at++
			fmt.Printf("point %d %s\n", at, p)
			_, err := in.ReadString('\n') // go on, or be killed
			return err
		})
		switch args[1] {
		case "prepare":
			_, err = transfer.New(b.Source(), b.Sink(), o).Prepare(ctx, m, a.Source(), nil)
		case "finish":
			_, err = transfer.New(b.Source(), b.Sink(), o).Finish(ctx, m, a.Source(), nil)
		case "return":
			_, err = transfer.New(a.Source(), a.Sink(), o).Return(ctx, kept.Back(), b.Source())
		case "undo":
			_, err = transfer.New(a.Source(), a.Sink(), o).Prepare(ctx, undo, b.Source(), nil)
		case "undone":
			_, err = transfer.New(a.Source(), a.Sink(), o).Finish(ctx, undo, b.Source(), nil)
		case "serve":
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			fmt.Printf("url http://%s\n", l.Addr())
			return http.Serve(l, transfer.Handler(a.Source(), func(*http.Request, cells.MoveRef) error { return nil }))
		case "discard":
			err = transfer.New(a.Source(), a.Sink(), transfer.WithRemoveBatch(150)).Discard(ctx, m.Tenant, cells.Residue{Cell: m.Source, Epoch: m.CloseEpoch(), Move: m.ID},
				func(cells.Progress) { at++; fmt.Printf("point %d removed\n", at); _, _ = in.ReadString('\n') })
		}
		return err
	}()
	if err != nil {
		fmt.Println("failed:", err)
		return 1, true
	}
	fmt.Println("done")
	return 0, true
}

// child is a process of the suite that carries out a step.
func (w *world) child(step string) *exec.Cmd {
	w.tb.Helper()
	self, err := os.Executable()
	w.must(err)
	cmd := exec.CommandContext(w.tb.Context(), self, "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+strings.Join([]string{w.h.Engine, step, w.a.Spec(), w.b.Spec()}, "\x1f"))
	return cmd
}

// runChild starts a process that carries out a step, and kills it at its nth
// point. It reports whether the step was done before.
func (w *world) runChild(step string, n int) (done bool) {
	w.tb.Helper()
	cmd := w.child(step)
	out, err := cmd.StdoutPipe()
	w.must(err)
	in, err := cmd.StdinPipe()
	w.must(err)
	w.must(cmd.Start())
	lines := bufio.NewScanner(out)
	last := ""
	for lines.Scan() {
		last = lines.Text()
		at, ok := strings.CutPrefix(last, "point ")
		if !ok {
			continue
		}
		if at, _, _ = strings.Cut(at, " "); at == strconv.Itoa(n) {
			w.must(cmd.Process.Kill()) // as kill -9
			break
		}
		fmt.Fprintln(in)
	}
	err = cmd.Wait()
	if last == "done" {
		return true
	}
	if !strings.HasPrefix(last, "point ") {
		w.tb.Fatalf("the child of step %s ended with %q: %v", step, last, err)
	}
	return false
}

// testKilledTarget kills the process that carries out a step at each point that it
// passes, under writes, and lets another one go on.
func testKilledTarget(tb TB, h Harness) {
	if h.Reopen == nil {
		tb.Logf("databases of this harness cannot be opened by another process")
		return
	}
	w := newWorld(tb, h)
	w.fill(1200)
	l := w.hammer(1, 20)
	m := w.move("m1")
	for n := 1; !w.runChild("prepare", n); n++ {
		if n > 30 {
			tb.Fatalf("not prepared after %d kills", n)
		}
	}
	l.reach(10)
	w.close(m)
	l.end()
	for n := 1; !w.runChild("finish", n); n++ {
		if n > 30 {
			tb.Fatalf("not finished after %d kills", n)
		}
	}
	l.kept(w.same())
	w.commit(m)
	for n := 1; !w.runChild("discard", n); n++ {
		if n > 60 {
			tb.Fatalf("not removed after %d kills", n)
		}
	}
	if d := w.dump(w.a); len(d) > 0 {
		tb.Fatalf("%d rows left", len(d))
	}
	w.clean(w.a)
	w.bystandersUntouched()
}

// testKilledSource kills the source's processes, one after the other, at points that
// the target passes; another one is there each time.
func testKilledSource(tb TB, h Harness) {
	if h.Reopen == nil {
		tb.Logf("databases of this harness cannot be opened by another process")
		return
	}
	w := newWorld(tb, h)
	w.fill(1200)
	l := w.hammer(1, 20)
	m := w.move("m1")
	var urls []string
	var processes []*exec.Cmd
	for range 5 {
		cmd := w.child("serve")
		out, err := cmd.StdoutPipe()
		w.must(err)
		w.must(cmd.Start())
		tb.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		line, err := bufio.NewReader(out).ReadString('\n')
		w.must(err)
		urls = append(urls, strings.TrimSpace(strings.TrimPrefix(line, "url ")))
		processes = append(processes, cmd)
	}
	kill := func() {
		if len(processes) > 1 {
			w.must(processes[0].Process.Kill()) // as kill -9
			processes = processes[1:]
		}
	}
	src := transfer.NewRemoteSource(client(tb), urls)
	seen := map[string]bool{}
	v := h.agent(tb, w.b, transfer.WithFault(func(p string) error {
		if (p == "aligned" || p == "batch" || p == "prepared" || p == "final") && !seen[p] {
			seen[p] = true
			kill()
		}
		return nil
	}))
	_, err := v.Prepare(tb.Context(), m, src, nil)
	w.must(err)
	l.reach(10)
	w.close(m)
	l.end()
	_, err = v.Finish(tb.Context(), m, src, nil)
	w.must(err)
	if len(processes) != 1 {
		tb.Errorf("%d processes are left", len(processes))
	}
	l.kept(w.same())
	w.commit(m)
	w.gone(w.a)
	w.bystandersUntouched()
}
