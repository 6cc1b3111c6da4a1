// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// maxTraceViolations bounds how many violations of campaigns an error names.
const maxTraceViolations = 20

// TraceReport says what the trace of directories contained.
type TraceReport struct {
	cells.TraceReport
	// Campaigns is how many there were, CampaignActions counts what they did.
	Campaigns       int            `json:"campaigns"`
	CampaignActions map[string]int `json:"campaign_actions"`
	// CampaignGaps is how many changes are not in the trace, because who made them was
	// not traced or died first.
	CampaignGaps int `json:"campaign_gaps"`
	// Rollouts, RolloutActions and RolloutGaps are the same of rollouts.
	Rollouts       int            `json:"rollouts"`
	RolloutActions map[string]int `json:"rollout_actions"`
	RolloutGaps    int            `json:"rollout_gaps"`
}

// CheckTrace reads what [Config.Trace] of one or more directories has received, and
// checks that it is a behaviour of the protocol ([cells.CheckTrace]) and of campaigns:
// each change follows from the one before by an action of the model; an item is begun
// by a driver of a campaign that runs, under the next attempt; a move is recorded once,
// for an attempt that was begun; an item says MOVED exactly if its move was committed,
// and has no other result than by a move that is over or was never recorded; nothing
// runs in a campaign that is over. Of rollouts: each change follows from the one before
// by an event that fits its state; waves come one after the other, and none follows
// before every unit of the one before has its result; a campaign is opened under the next
// number while no other is, made only when it was opened, and closed only when it is
// over; and what is over changes no more. Lines may come in any order.
//
// The error wraps [cells.ErrInvalid] and joins the first violations of either.
func CheckTrace(r io.Reader) (TraceReport, error) {
	rep := TraceReport{CampaignActions: map[string]int{}, RolloutActions: map[string]int{}}
	all, err := io.ReadAll(r)
	if err != nil {
		return rep, fmt.Errorf("%w: trace: %w", cells.ErrInvalid, err)
	}
	var moves error
	if rep.TraceReport, moves = cells.CheckTrace(bytes.NewReader(all)); moves != nil && rep.Tenants == 0 {
		return rep, moves // a line that cannot be read
	}
	camps := map[api.CampaignID]*campaignTrace{}
	ends := map[cells.MoveID]*moveEnd{}
	rolls := map[api.RolloutID]*rolloutTrace{}
	sc := bufio.NewScanner(bytes.NewReader(all))
	sc.Buffer(nil, 1<<20)
	for n := 1; sc.Scan(); n++ {
		var l struct {
			CampaignTrace
			Row *cells.TenantRoute `json:"row"`
		}
		if len(sc.Bytes()) == 0 {
			continue
		}
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
			return rep, fmt.Errorf("%w: trace line %d: %w", cells.ErrInvalid, n, err)
		}
		if l.Row != nil {
			noteEnd(ends, l.Row)
		}
		var ro RolloutTrace
		if err := json.Unmarshal(sc.Bytes(), &ro); err != nil {
			return rep, fmt.Errorf("%w: trace line %d: %w", cells.ErrInvalid, n, err)
		}
		if ro.Rollout != "" {
			if rolls[ro.Rollout] == nil {
				rolls[ro.Rollout] = &rolloutTrace{id: ro.Rollout}
			}
			rolls[ro.Rollout].lines = append(rolls[ro.Rollout].lines, ro)
		}
		if l.Campaign == "" {
			continue
		}
		c := camps[l.Campaign]
		if c == nil {
			c = &campaignTrace{records: map[cells.MoveID]int{}, begun: map[cells.MoveID]bool{}}
			camps[l.Campaign] = c
		}
		c.lines = append(c.lines, l.CampaignTrace)
	}
	rep.Campaigns = len(camps)
	bad := []error{moves}
	for _, id := range slices.Sorted(maps.Keys(camps)) {
		c := camps[id]
		c.check(&rep, ends)
		for _, err := range c.bad {
			if len(bad) <= maxTraceViolations {
				bad = append(bad, fmt.Errorf("%w: campaign %s: %w", cells.ErrInvalid, id, err))
			}
		}
	}
	rep.Rollouts = len(rolls)
	for _, id := range slices.Sorted(maps.Keys(rolls)) {
		r := rolls[id]
		r.check(&rep, camps)
		for _, err := range r.bad {
			if len(bad) <= maxTraceViolations {
				bad = append(bad, fmt.Errorf("%w: rollout %s: %w", cells.ErrInvalid, id, err))
			}
		}
	}
	return rep, errors.Join(bad...)
}

// moveEnd is what rows say of how a move ended.
type moveEnd struct{ committed, back bool }

func noteEnd(ends map[cells.MoveID]*moveEnd, r *cells.TenantRoute) {
	of := func(id cells.MoveID) *moveEnd {
		if ends[id] == nil {
			ends[id] = &moveEnd{}
		}
		return ends[id]
	}
	if r.MoveID != "" && r.State == cells.StateCommitting {
		e := of(r.MoveID)
		e.committed = e.committed || r.CellID == r.TargetCell
		e.back = e.back || r.CellID == r.SourceCell
	}
}

// campaignTrace is what a trace says of one campaign.
type campaignTrace struct {
	lines   []CampaignTrace
	records map[cells.MoveID]int
	begun   map[cells.MoveID]bool
	gaps    int
	bad     []error
}

func (c *campaignTrace) failf(format string, args ...any) {
	c.bad = append(c.bad, fmt.Errorf(format, args...))
}

func (c *campaignTrace) check(rep *TraceReport, ends map[cells.MoveID]*moveEnd) {
	var changes []CampaignTrace
	unfit, quiet := map[cells.MoveID]bool{}, 0
	for _, l := range c.lines {
		if l.Action != actionOther {
			rep.CampaignActions[l.Action]++
		}
		switch l.Action {
		case ActionBegin:
			c.begun[l.Move] = true
		case ActionRecord:
			c.records[l.Move]++
		case ActionUnfit:
			unfit[l.Move] = true
		}
		if l.Version > 0 {
			changes = append(changes, l)
		} else if l.Item == 0 {
			quiet++ // it has a version, which its maker was not told
		}
	}
	slices.SortStableFunc(changes, func(a, b CampaignTrace) int { return cmp.Compare(a.Version, b.Version) })
	for i := range changes {
		if i > 0 {
			c.gaps += int(max(changes[i].Version-changes[i-1].Version-1, 0))
		} else {
			c.gaps += int(changes[i].Version - 1)
		}
	}
	c.gaps = max(c.gaps-quiet, 0)
	c.follow(changes, ends)
	for _, id := range slices.Sorted(maps.Keys(c.records)) {
		switch {
		case c.records[id] > 1:
			c.failf("move %s was recorded %d times", id, c.records[id])
		case unfit[id]:
			c.failf("move %s was recorded although its item was given up", id)
		case !c.begun[id] && c.gaps == 0:
			c.failf("move %s was recorded for an attempt that was not begun", id)
		}
	}
	rep.CampaignGaps += c.gaps
}

// itemAt is an item as the last line about it left it.
type itemAt struct {
	state   api.ItemState
	attempt int
}

// follow checks each change against those before it.
func (c *campaignTrace) follow(changes []CampaignTrace, ends map[cells.MoveID]*moveEnd) {
	items := map[int64]itemAt{}
	var last CampaignTrace
	for _, l := range changes {
		switch {
		case l.Version == last.Version:
			c.failf("version %d was written twice: %s and %s", l.Version, last.Action, l.Action)
		case l.Version != last.Version+1:
			clear(items) // any of them may have changed, many at once
		case last.To != l.From && last.Version > 0:
			c.failf("version %d finds the campaign %s, it was %s", l.Version, l.From, last.To)
		}
		if l.Item > 0 {
			if was, ok := items[l.Item]; ok && was != (itemAt{l.ItemFrom, l.Before}) {
				c.failf("version %d finds item %d %s at attempt %d, it was %s at %d", l.Version, l.Item, l.ItemFrom, l.Before, was.state, was.attempt)
			}
			items[l.Item] = itemAt{l.ItemTo, l.Attempt}
			c.checkItem(&l, ends)
		} else {
			c.checkWhole(&l)
		}
		last = l
	}
}

// checkItem checks the change of an item by itself.
func (c *campaignTrace) checkItem(l *CampaignTrace, ends map[cells.MoveID]*moveEnd) {
	end := ends[l.Move]
	if end == nil {
		end = &moveEnd{}
	}
	switch l.Action {
	case ActionBegin:
		switch {
		case l.From != api.CampaignRunning:
			c.failf("item %d was begun in a campaign that is %s", l.Item, l.From)
		case l.Driver == "" || l.Driver != l.By:
			c.failf("item %d was begun by %s, the driver is %q", l.Item, l.By, l.Driver)
		case l.Attempt != l.Before+1 || l.Move != api.ItemMove(l.Campaign, l.Item, l.Attempt):
			c.failf("item %d was begun as attempt %d after %d, by move %s", l.Item, l.Attempt, l.Before, l.Move)
		}
	case ActionResult, ActionUnfit:
		moved := l.ItemTo == api.ItemMoved
		switch {
		case l.Attempt != l.Before:
			c.failf("the result of attempt %d of item %d was given to attempt %d", l.Before, l.Item, l.Attempt)
		case l.Action == ActionUnfit && moved:
			c.failf("item %d is %s without a move", l.Item, l.ItemTo)
		case moved && (end.back || !end.committed && c.records[l.Move] == 0 && c.gaps == 0):
			c.failf("item %d is %s, its move %s was not committed", l.Item, l.ItemTo, l.Move)
		case !moved && end.committed:
			c.failf("item %d is %s, its move %s was committed", l.Item, l.ItemTo, l.Move)
		}
	default:
		c.failf("version %d makes item %d %s of %s", l.Version, l.Item, l.ItemTo, l.ItemFrom)
	}
}

// checkWhole checks a change of the campaign by itself.
func (c *campaignTrace) checkWhole(l *CampaignTrace) {
	if l.From != "" && l.From != l.To && orderOf(l.From, l.To) != l.Action || l.Action == actionOther && l.From != "" && l.From != l.To {
		c.failf("version %d makes it %s of %s, by %s", l.Version, l.To, l.From, l.Action)
	}
	switch l.Action {
	case ActionFinish:
		if l.Counts == nil || l.Counts.Running > 0 || l.Counts.Pending > 0 {
			c.failf("it is %s with %+v", l.To, l.Counts)
		}
		if want := map[api.CampaignState]api.CampaignState{api.CampaignDone: api.CampaignRunning, api.CampaignAborted: api.CampaignAborting}[l.To]; l.From != want {
			c.failf("it is %s after %s", l.To, l.From)
		}
	case ActionAbort:
		if l.From.Final() {
			c.failf("it is %s after %s", l.To, l.From)
		}
	}
}
