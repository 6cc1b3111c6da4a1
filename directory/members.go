// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

type memberKey struct {
	cell     cells.CellID
	instance string
}

func keyOf(h *member.Heartbeat) memberKey { return memberKey{h.Cell, h.Instance} }

// memberState is one process that was heard.
type memberState struct {
	hb    member.Heartbeat
	heard time.Time // monotonic
	since time.Time
	// remote: heard through the store, by the growth of its beat; such news is older.
	remote bool
}

// seenBeat is what the store last said of a process.
type seenBeat struct {
	beat int64
	at   time.Time // when it was first seen at that beat
}

// members knows which processes live. Heartbeats arrive at one directory; the
// others learn of them through the store.
type members struct {
	store      Store
	log        *slog.Logger
	lapse      time.Duration // of what is heard here
	slack      time.Duration // more for what is heard through the store
	syncEvery  time.Duration
	changed    func() // a process came, went, or changed what others must know
	syncSignal chan struct{}

	syncMu sync.Mutex             // held while the store is written and read, so that nobody who leaves is written again
	beats  map[memberKey]seenBeat // guarded by syncMu
	first  bool                   // guarded by syncMu

	mu    sync.Mutex                 // never held while waiting for syncMu
	live  map[memberKey]*memberState // guarded by mu
	dirty map[memberKey]struct{}     // guarded by mu; heard since the last sync
	left  map[memberKey]time.Time    // guarded by mu; who has left, and when
}

func newMembers(store Store, cfg *Config, changed func()) *members {
	return &members{
		store: store, log: cfg.Logger, lapse: cfg.Lapse, slack: 2 * cfg.SyncEvery, syncEvery: cfg.SyncEvery, changed: changed,
		syncSignal: make(chan struct{}, 1), live: map[memberKey]*memberState{}, dirty: map[memberKey]struct{}{},
		beats: map[memberKey]seenBeat{}, first: true, left: map[memberKey]time.Time{},
	}
}

func (s *memberState) lapsed(now time.Time, m *members) bool {
	limit := m.lapse
	if s.remote {
		limit += m.slack
	}
	return now.Sub(s.heard) >= limit
}

// beat takes a heartbeat. One that was overtaken by its process's leave is ignored.
func (m *members) beat(h member.Heartbeat) {
	now := time.Now()
	m.mu.Lock()
	if _, gone := m.left[keyOf(&h)]; gone {
		m.mu.Unlock()
		return
	}
	old := m.live[keyOf(&h)]
	news := old == nil || old.lapsed(now, m) || old.hb.Ready != h.Ready || old.hb.Reason != h.Reason ||
		old.hb.ServiceURL != h.ServiceURL || old.hb.AgentURL != h.AgentURL || old.hb.Version != h.Version
	since := now
	if old != nil {
		since = old.since
	}
	m.live[keyOf(&h)] = &memberState{hb: h, heard: now, since: since}
	m.dirty[keyOf(&h)] = struct{}{}
	m.mu.Unlock()
	if news {
		m.changed()
		m.kick()
	}
}

func (m *members) kick() {
	select {
	case m.syncSignal <- struct{}{}:
	default:
	}
}

// leave forgets a process for good: an instance is one start of a process.
func (m *members) leave(ctx context.Context, key memberKey) error {
	m.mu.Lock()
	_, was := m.live[key]
	delete(m.live, key)
	delete(m.dirty, key)
	m.left[key] = time.Now()
	m.mu.Unlock()
	if was {
		m.changed()
	}
	m.syncMu.Lock()
	defer m.syncMu.Unlock()
	return m.store.RemoveMember(ctx, key.cell, key.instance)
}

// locate returns the live processes of the cell, ready ones first.
func (m *members) locate(cell cells.CellID) []member.Heartbeat {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []member.Heartbeat
	for k, s := range m.live {
		if k.cell == cell && !s.lapsed(now, m) {
			out = append(out, s.hb)
		}
	}
	slices.SortFunc(out, func(a, b member.Heartbeat) int {
		if a.Ready != b.Ready {
			if a.Ready {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Instance, b.Instance)
	})
	return out
}

// serving returns the cells with a process that is live and ready.
func (m *members) serving() []cells.CellID {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	out := []cells.CellID{}
	for k, s := range m.live {
		if s.hb.Ready && !s.lapsed(now, m) && !slices.Contains(out, k.cell) {
			out = append(out, k.cell)
		}
	}
	return out
}

// list returns everything that was heard and is not forgotten.
func (m *members) list() []api.Member {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]api.Member, 0, len(m.live))
	for _, s := range m.live {
		h := &s.hb
		replaced := false
		for k, o := range m.live {
			replaced = replaced || k.cell == h.Cell && k.instance != h.Instance && o.hb.ServiceURL == h.ServiceURL && o.since.After(s.heard)
		}
		out = append(out, api.Member{
			Cell: h.Cell, Instance: h.Instance, Version: h.Version, PID: h.PID, ServiceURL: h.ServiceURL, AgentURL: h.AgentURL,
			Ready: h.Ready, Reason: h.Reason, Revision: h.Revision, Engine: h.Engine, InFlight: h.InFlight,
			Live: !s.lapsed(now, m), Replaced: replaced, Since: s.since.UTC(), Age: now.Sub(s.heard),
		})
	}
	slices.SortFunc(out, func(a, b api.Member) int {
		if c := strings.Compare(string(a.Cell), string(b.Cell)); c != 0 {
			return c
		}
		return strings.Compare(a.Instance, b.Instance)
	})
	return out
}

// expire drops lapsed processes and reports whether there were any.
func (m *members) expire() bool {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	any := false
	for k, at := range m.left {
		if now.Sub(at) > forgetAfter {
			delete(m.left, k)
		}
	}
	for k, s := range m.live {
		if s.lapsed(now, m) {
			m.log.Warn("member lapsed", "cell", k.cell, "instance", k.instance, "silent", now.Sub(s.heard))
			delete(m.live, k)
			delete(m.dirty, k)
			any = true
		}
	}
	return any
}

// sync writes what was heard and learns what others have heard.
func (m *members) sync(ctx context.Context) error {
	m.syncMu.Lock()
	defer m.syncMu.Unlock()
	m.mu.Lock()
	var out []member.Heartbeat
	for k := range m.dirty {
		if s := m.live[k]; s != nil {
			out = append(out, s.hb)
		}
	}
	taken := m.dirty
	m.dirty = map[memberKey]struct{}{}
	m.mu.Unlock()

	if err := m.store.SaveMembers(ctx, out, time.Now()); err != nil {
		m.mu.Lock()
		for k := range taken {
			m.dirty[k] = struct{}{}
		}
		m.mu.Unlock()
		return err
	}
	rows, err := m.store.Members(ctx)
	if err != nil {
		return err
	}
	if m.absorb(ctx, rows) {
		m.changed()
	}
	return nil
}

// forgetAfter is for how long the store remembers a process that nobody hears, and
// this process one that has left.
const forgetAfter = 10 * time.Minute

func (m *members) absorb(ctx context.Context, rows []MemberRow) (news bool) {
	now := time.Now()
	known := make(map[memberKey]bool, len(rows))
	var old []memberKey
	m.mu.Lock()
	for i := range rows {
		r := &rows[i]
		k := keyOf(&r.Heartbeat)
		known[k] = true
		before, seen := m.beats[k]
		grew := seen && r.Beat > before.beat || !seen && !m.first
		if !seen || r.Beat != before.beat {
			m.beats[k] = seenBeat{beat: r.Beat, at: now}
		} else if now.Sub(before.at) > forgetAfter {
			old = append(old, k)
		}
		s := m.live[k]
		if _, gone := m.left[k]; gone || s != nil && !s.remote {
			continue
		}
		// At the start the processes that the store remembers are given one lapse.
		if !grew && !(m.first && s == nil) {
			continue
		}
		news = news || s == nil || s.hb.Ready != r.Heartbeat.Ready || s.hb.ServiceURL != r.Heartbeat.ServiceURL
		since := now
		if s != nil {
			since = s.since
		}
		m.live[k] = &memberState{hb: r.Heartbeat, heard: now, since: since, remote: true}
	}
	for k, s := range m.live {
		if s.remote && !known[k] { // it left, at another directory
			delete(m.live, k)
			news = true
		}
	}
	for k := range m.beats {
		if !known[k] {
			delete(m.beats, k)
		}
	}
	m.first = false
	m.mu.Unlock()
	for _, k := range old {
		if err := m.store.RemoveMember(ctx, k.cell, k.instance); err != nil {
			m.log.Warn("old member not forgotten", "cell", k.cell, "instance", k.instance, "err", err)
		}
	}
	return news
}
