// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/channeltest"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/table/remote"
)

func TestChannelRoles(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{})
	cell, edge, operator := d.peer(channel.RoleCell, "a"), d.peer(channel.RoleEdge, "e"), d.peer(channel.RoleOperator, "alice")
	get := func(h *http.Client, path string) answer {
		req, err := http.NewRequestWithContext(ctxOf(t), http.MethodGet, d.chURL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		return d.do(h, req)
	}
	for name, c := range map[string]struct {
		got  answer
		want int
	}{
		"heartbeat of a cell":      {d.post(cell, member.PathHeartbeat, heartbeat("a", "i1", true)), 200},
		"heartbeat of an edge":     {d.post(edge, member.PathHeartbeat, heartbeat("a", "i1", true)), 403},
		"heartbeat of an operator": {d.post(operator, member.PathHeartbeat, heartbeat("a", "i1", true)), 403},
		"leave of an edge":         {d.post(edge, member.PathLeave, heartbeat("a", "i1", true)), 403},
		"topology for an edge":     {get(edge, api.PathTopology), 200},
		"topology for a cell":      {get(cell, api.PathTopology), 403},
		"routes for an edge":       {get(edge, member.PathRoutes), 200},
		"routes for a cell":        {get(cell, member.PathRoutes), 200},
		"routes for an operator":   {get(operator, member.PathRoutes), 403},
		"placement by an edge":     {d.post(edge, api.PathPlacements, api.PlacementRequest{Tenant: "t", Cell: "a"}), 403},
		"placement by an operator": {d.post(operator, api.PathPlacements, api.PlacementRequest{Tenant: "t", Cell: "a"}), 403},
		"cells for a cell":         {get(cell, api.PathCells), 404},
		"moves by a cell":          {d.post(cell, api.PathMoves, api.MoveRequest{Tenant: "t", To: "a"}), 404},
	} {
		if c.got.status != c.want {
			t.Errorf("%s: %d, want %d\n%s", name, c.got.status, c.want, c.got.body)
		}
	}
	// Without a certificate, and with another fleet's, there is no connection at all.
	plain := &http.Transport{}
	defer plain.CloseIdleConnections()
	stranger := channeltest.New(t, "other").Open(t, channel.RoleCell, "a").Client(channel.Identity{Role: channel.RoleDirectory})
	defer stranger.CloseIdleConnections()
	for name, h := range map[string]*http.Client{"plain": {Transport: plain}, "stranger": stranger} {
		req, err := http.NewRequestWithContext(ctxOf(t), http.MethodGet, d.chURL+member.PathRoutes, nil)
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := h.Do(req); err == nil {
			resp.Body.Close()
			t.Errorf("%s client got %s", name, resp.Status)
		}
	}
}

func TestHeartbeatRefusals(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	h := d.peer(channel.RoleCell, "a")
	with := func(f func(*member.Heartbeat)) member.Heartbeat {
		hb := heartbeat("a", "i1", true)
		f(&hb)
		return hb
	}
	for name, c := range map[string]struct {
		body any
		code cells.Code
	}{
		"another cell":    {with(func(h *member.Heartbeat) { h.Cell = "b" }), cells.CodeForbidden},
		"no instance":     {with(func(h *member.Heartbeat) { h.Instance = "" }), cells.CodeBadRequest},
		"bad instance":    {with(func(h *member.Heartbeat) { h.Instance = "a/b" }), cells.CodeBadRequest},
		"bad service url": {with(func(h *member.Heartbeat) { h.ServiceURL = "ftp://x" }), cells.CodeBadRequest},
		"agent over http": {with(func(h *member.Heartbeat) { h.AgentURL = "http://x" }), cells.CodeBadRequest},
		"not an object":   {[]int{1}, cells.CodeBadRequest},
	} {
		if a := d.post(h, member.PathHeartbeat, c.body); a.code() != string(c.code) {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	if a := d.post(d.peer(channel.RoleCell, "ghost"), member.PathHeartbeat, heartbeat("ghost", "i1", true)); a.code() != string(cells.CodeNotFound) {
		t.Errorf("unregistered cell: %d %s", a.status, a.body)
	}
	if list, err := d.cl.Members(ctxOf(t)); err != nil || len(list) != 0 {
		t.Errorf("members %+v, %v", list, err)
	}
	// What a newer build adds, or says at length, is no reason to lose a process.
	long := strings.Repeat("é", 2000)
	if a := d.post(h, member.PathHeartbeat, map[string]any{"cell": "a", "instance": "i1", "colour": "red", "version": long, "reason": long}); a.status != 200 {
		t.Errorf("newer heartbeat: %d %s", a.status, a.body)
	}
	if list, err := d.cl.Members(ctxOf(t)); err != nil || len(list) != 1 || len(list[0].Version) != 128 || len(list[0].Reason) != 1024 {
		t.Errorf("members %+v, %v", list, err)
	}
	var reply member.HeartbeatReply
	a := d.post(h, member.PathHeartbeat, heartbeat("a", "i1", true))
	if err := json.Unmarshal([]byte(a.body), &reply); err != nil || reply.Every != 50*time.Millisecond || reply.Lapse != 400*time.Millisecond {
		t.Errorf("reply %s, %v", a.body, err)
	}
}

func TestCellPlacesForItself(t *testing.T) {
	d := newState(t).start(t, func(c *directory.Config) { c.PlacementsPerMinute = 5 })
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	h := d.peer(channel.RoleCell, "a")
	if a := d.post(h, api.PathPlacements, api.PlacementRequest{Tenant: "t", Cell: "b"}); a.code() != string(cells.CodeForbidden) {
		t.Errorf("for another cell: %d %s", a.status, a.body)
	}
	if a := d.post(h, api.PathPlacements, api.PlacementRequest{Tenant: "t"}); a.status != http.StatusCreated || !strings.Contains(a.body, `"cell":"a"`) {
		t.Errorf("for itself: %d %s", a.status, a.body)
	}
	d.place("u", "b")
	if a := d.post(h, api.PathPlacements, api.PlacementRequest{Tenant: "u"}); a.status != http.StatusOK || !strings.Contains(a.body, `"cell":"b"`) {
		t.Errorf("another's tenant: %d %s", a.status, a.body)
	}
	limited := false
	for range 10 {
		a := d.post(h, api.PathPlacements, api.PlacementRequest{Tenant: "t"})
		if a.code() == string(cells.CodeRateLimited) {
			limited = a.status == http.StatusTooManyRequests && a.header.Get("Retry-After") != ""
			break
		}
	}
	if !limited {
		t.Error("the cell's rate has no bound")
	}
	// Others are not held back by it.
	if a := d.post(d.peer(channel.RoleCell, "b"), api.PathPlacements, api.PlacementRequest{Tenant: "v"}); a.status != http.StatusCreated {
		t.Errorf("another cell: %d %s", a.status, a.body)
	}
	d.place("w", "a")
}

func TestRoutesAreReadOnly(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{})
	p := d.place("t", "a")
	tab := remote.NewClient(d.peer(channel.RoleEdge, "e"), d.chURL)
	r, err := tab.Get(ctxOf(t), "t")
	if err != nil || r.Revision != p.Route.Revision {
		t.Errorf("route %+v, %v", r, err)
	}
	r.CellID = "b"
	r.Epoch += 2
	if _, err := tab.CompareAndSet(ctxOf(t), r.Revision, r); err == nil {
		t.Error("an edge wrote a route")
	}
	if got := d.route("t"); got.CellID != "a" {
		t.Errorf("route is %+v", got)
	}
}

// watchTopology reads topologies into a channel until the test ends.
func (d *dir) watchTopology() <-chan api.Topology {
	d.t.Helper()
	e, err := client.Edge(d.peer(channel.RoleEdge, "e"), d.chURL)
	if err != nil {
		d.t.Fatal(err)
	}
	out := make(chan api.Topology, 100)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.WatchTopology(ctx, func(t *api.Topology) error {
			if t != nil {
				out <- *t
			}
			return nil
		})
	}()
	d.t.Cleanup(func() { cancel(); <-done })
	return out
}

func waitTopology(t *testing.T, ch <-chan api.Topology, what string, ok func(*api.Topology) bool) api.Topology {
	t.Helper()
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	var last api.Topology
	for {
		select {
		case last = <-ch:
			if ok(&last) {
				return last
			}
		case <-limit.C:
			t.Fatalf("no topology in which %s; the last was %+v", what, last)
		}
	}
}

func TestTopology(t *testing.T) {
	s := newState(t)
	d := s.start(t, func(c *directory.Config) { c.Lapse = 3 * time.Second })
	watch := d.watchTopology()
	first := waitTopology(t, watch, "nothing is", func(*api.Topology) bool { return true })
	if len(first.Cells) != 0 || first.Directory != d.Instance() {
		t.Errorf("first %+v", first)
	}
	d.cell("a", api.CellSpec{Host: "a.example", Jurisdiction: "eu", Version: "v3", Default: true, Issuers: []string{"https://id"}})
	top := waitTopology(t, watch, "a is", func(x *api.Topology) bool { return x.Cell("a") != nil })
	if c := top.Cell("a"); c.Host != "a.example" || c.Version != "v3" || len(c.Upstreams) != 0 || top.DefaultCell != "a" || c.Issuers[0] != "https://id" {
		t.Errorf("topology %+v", top)
	}
	h := d.peer(channel.RoleCell, "a")
	beat := func(instance string, ready bool) {
		t.Helper()
		if a := d.post(h, member.PathHeartbeat, heartbeat("a", instance, ready)); a.status != 200 {
			t.Fatalf("heartbeat: %d %s", a.status, a.body)
		}
	}
	ups := func(n int) func(*api.Topology) bool {
		return func(x *api.Topology) bool { c := x.Cell("a"); return c != nil && len(c.Upstreams) == n }
	}
	beat("i1", false)
	beat("i1", true)
	waitTopology(t, watch, "i1 is ready", ups(1))
	beat("i22", true)
	waitTopology(t, watch, "i22 is ready", ups(2))
	beat("i22", false)
	waitTopology(t, watch, "i22 is not ready", ups(1))
	if a := d.post(h, member.PathLeave, heartbeat("a", "i1", true)); a.status != 200 {
		t.Fatalf("leave: %s", a.body)
	}
	waitTopology(t, watch, "i1 has left", ups(0))
	beat("i1", true) // sent before it left, and late
	beat("i333", true)
	top = waitTopology(t, watch, "i333 is ready", ups(1))
	if got := top.Cell("a").Upstreams[0]; got != "http://10.0.0.1:804" {
		t.Errorf("upstream %s is not i333's", got)
	}
	// Nobody is ready, and one process says that it only lacks its store: it is asked.
	lone := heartbeat("a", "i333", false)
	lone.StoreDown, lone.Reason = true, "the database"
	if a := d.post(h, member.PathHeartbeat, lone); a.status != 200 {
		t.Fatalf("heartbeat: %s", a.body)
	}
	beat("i4444", true)
	waitTopology(t, watch, "i4444 is ready, i333 is not asked", func(x *api.Topology) bool {
		return ups(1)(x) && x.Cell("a").Upstreams[0] != "http://10.0.0.1:804"
	})
	beat("i4444", false)
	waitTopology(t, watch, "nobody is ready, i333 is asked", func(x *api.Topology) bool {
		return ups(1)(x) && x.Cell("a").Upstreams[0] == "http://10.0.0.1:804"
	})
	waitTopology(t, watch, "i333 has lapsed", ups(0)) // nobody beats
	d.cell("a", api.CellSpec{Upstream: "http://lb:80"})
	top = waitTopology(t, watch, "a has an upstream", ups(1))
	if top.DefaultCell != "" || top.Cell("a").Upstreams[0] != "http://lb:80" {
		t.Errorf("topology %+v", top)
	}
}

func TestTopologyStaysAlive(t *testing.T) {
	d := newState(t).start(t, nil)
	req, err := http.NewRequestWithContext(ctxOf(t), http.MethodGet, d.chURL+api.PathTopology+"?watch=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := d.peer(channel.RoleEdge, "e").Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	sc := bufio.NewScanner(resp.Body)
	var lines []string
	for len(lines) < 4 && sc.Scan() {
		lines = append(lines, sc.Text())
	}
	if len(lines) != 4 || !strings.Contains(lines[0], `"topology"`) || lines[1] != `{"alive":true}` || lines[3] != `{"alive":true}` {
		t.Errorf("lines %q", lines)
	}
}

// A directory that starts does not tell edges that nothing runs, and directories
// on one store tell each other whom they hear.
func TestMembersAcrossDirectories(t *testing.T) {
	s := newState(t)
	d1 := s.start(t, func(c *directory.Config) { c.Lapse = 3 * time.Second })
	d1.cell("a", api.CellSpec{})
	h := d1.peer(channel.RoleCell, "a")
	if a := d1.post(h, member.PathHeartbeat, heartbeat("a", "i1", true)); a.status != 200 {
		t.Fatal(a.body)
	}
	eventually(t, "member is written", func() bool {
		rows, err := d1.store.Members(ctxOf(t))
		return err == nil && len(rows) == 1
	})
	d2 := s.start(t, func(c *directory.Config) { c.Name = "d2"; c.Lapse = 3 * time.Second })
	if list, err := d2.cl.Members(ctxOf(t)); err != nil || len(list) != 1 || !list[0].Live {
		t.Errorf("a new directory's members: %+v, %v", list, err)
	}
	has := func(d *dir, instance string) bool {
		list, err := d.cl.Members(ctxOf(t))
		return err == nil && slices.ContainsFunc(list, func(m api.Member) bool { return m.Instance == instance && m.Live })
	}
	// Nobody hears it any more: both find out.
	eventually(t, "the member is gone here", func() bool { return !has(d1, "i1") })
	eventually(t, "the member is gone there", func() bool { return !has(d2, "i1") })
	beat := func(instance string) {
		if a := d1.post(h, member.PathHeartbeat, heartbeat("a", instance, true)); a.status != 200 {
			t.Errorf("heartbeat: %s", a.body)
		}
	}
	eventually(t, "the other directory hears of a new member", func() bool { beat("i2"); return has(d2, "i2") })
	for range 20 { // it stays for as long as it beats here
		beat("i2")
		if !has(d2, "i2") {
			t.Fatal("a member that beats is gone at the other directory")
		}
	}
	if a := d1.post(h, member.PathLeave, heartbeat("a", "i2", true)); a.status != 200 {
		t.Fatal(a.body)
	}
	eventually(t, "the leave is known there", func() bool { return !has(d2, "i2") })
}

// With its store gone a directory still knows who lives, and changes nothing.
func TestStoreDown(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.place("t", "a")
	watch := d.watchTopology()
	if err := d.store.Close(); err != nil {
		t.Fatal(err)
	}
	h := d.peer(channel.RoleCell, "a")
	if a := d.post(h, member.PathHeartbeat, heartbeat("a", "i1", true)); a.status != 200 {
		t.Errorf("heartbeat: %d %s", a.status, a.body)
	}
	waitTopology(t, watch, "i1 is ready", func(x *api.Topology) bool { c := x.Cell("a"); return c != nil && len(c.Upstreams) == 1 })
	for name, call := range map[string]func() error{
		"place":    func() error { _, err := d.cl.Place(ctxOf(t), api.PlacementRequest{Tenant: "u"}); return err },
		"put cell": func() error { _, err := d.cl.PutCell(ctxOf(t), "c", api.CellSpec{}); return err },
		"move":     func() error { _, err := d.cl.Move(ctxOf(t), api.MoveRequest{Tenant: "t", To: "b"}); return err },
		"delete":   func() error { _, err := d.cl.DeleteTenant(ctxOf(t), "t", ""); return err },
	} {
		err := call()
		var u *client.UnknownOutcomeError
		if wantCode(t, err, cells.CodeBackendUnavailable); !errors.As(err, &u) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if r := d.route("t"); r.State != cells.StateActive || r.CellID != "a" {
		t.Errorf("route %+v", r)
	}
	if a := d.raw(http.MethodGet, api.PathReady, "none", "", ""); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, `"ok":false`) {
		t.Errorf("readyz: %d %s", a.status, a.body)
	}
	if list, err := d.cl.Tenants(ctxOf(t), client.TenantQuery{}); err != nil || len(list.Routes) != 1 {
		t.Errorf("routes: %+v, %v", list, err)
	}
}

func TestEdgeClientRefusals(t *testing.T) {
	d := newState(t).start(t, nil)
	for _, base := range []string{"http://127.0.0.1:1", "https://", "https://x/path", "::"} {
		if _, err := client.Edge(http.DefaultClient, base); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", base, err)
		}
	}
	e, err := client.Edge(d.peer(channel.RoleCell, "a"), d.chURL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Topology(ctxOf(t)); err == nil {
		t.Error("a cell read the topology")
	}
	e, err = client.Edge(d.peer(channel.RoleEdge, "e"), d.chURL)
	if err != nil {
		t.Fatal(err)
	}
	top, err := e.Topology(ctxOf(t))
	if err != nil || top.Directory != d.Instance() {
		t.Errorf("topology %+v, %v", top, err)
	}
	broke := make(chan error, 1)
	started := make(chan struct{}, 1)
	go func() {
		broke <- e.WatchTopology(ctxOf(t), func(*api.Topology) error {
			select {
			case started <- struct{}{}:
			default:
			}
			return nil
		})
	}()
	<-started
	d.close()
	if err := <-broke; !errors.Is(err, client.ErrWatchBroken) {
		t.Errorf("the watch ended with %v", err)
	}
}

// slowStore holds back the writing of members.
type slowStore struct {
	directory.Store
	reached, gate chan struct{}
	removed, done chan struct{}
}

func (s *slowStore) SaveMembers(ctx context.Context, list []member.Heartbeat, at time.Time) error {
	if len(list) > 0 {
		select {
		case s.reached <- struct{}{}:
			<-s.gate
			defer close(s.done)
		default:
		}
	}
	return s.Store.SaveMembers(ctx, list, at)
}

func (s *slowStore) RemoveMember(ctx context.Context, c cells.CellID, instance string) error {
	err := s.Store.RemoveMember(ctx, c, instance)
	close(s.removed)
	return err
}

// A process that leaves while the members are being written is not written again.
func TestLeaveDuringSync(t *testing.T) {
	var slow *slowStore
	d := newState(t).start(t, func(c *directory.Config) {
		slow = &slowStore{Store: c.Store, reached: make(chan struct{}, 1), gate: make(chan struct{}), removed: make(chan struct{}), done: make(chan struct{})}
		c.Store, c.Lapse = slow, time.Minute
	})
	d.cell("a", api.CellSpec{})
	h := d.peer(channel.RoleCell, "a")
	if a := d.post(h, member.PathHeartbeat, heartbeat("a", "i1", true)); a.status != 200 {
		t.Fatal(a.body)
	}
	eventually(t, "members are being written", func() bool { return len(slow.reached) == 1 })
	left := make(chan int, 1)
	go func() { left <- d.post(h, member.PathLeave, heartbeat("a", "i1", true)).status }()
	eventually(t, "it is gone at once", func() bool {
		list, err := d.cl.Members(ctxOf(t))
		return err == nil && len(list) == 0
	})
	select { // a leave that does not wait would be done by now
	case <-slow.removed:
	case <-time.After(100 * time.Millisecond):
	}
	close(slow.gate)
	<-slow.done
	if s := <-left; s != 200 {
		t.Errorf("leave answered %d", s)
	}
	rows, err := d.store.Members(ctxOf(t))
	if err != nil || len(rows) != 0 {
		t.Errorf("remembered members %+v, %v", rows, err)
	}
}
