// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// rolloutTrace is what a trace says of one rollout.
type rolloutTrace struct {
	id    api.RolloutID
	lines []RolloutTrace
	gaps  int
	bad   []error
}

func (r *rolloutTrace) failf(format string, args ...any) {
	r.bad = append(r.bad, fmt.Errorf(format, args...))
}

func (r *rolloutTrace) check(rep *TraceReport, camps map[api.CampaignID]*campaignTrace) {
	var changes []RolloutTrace
	quiet := 0
	for _, l := range r.lines {
		if l.Action != actionOther {
			rep.RolloutActions[l.Action]++
		}
		switch {
		case l.After != nil:
			changes = append(changes, l)
		default:
			quiet++ // it has a version, which its maker was not told
		}
	}
	slices.SortStableFunc(changes, func(a, b RolloutTrace) int { return cmp.Compare(a.Version, b.Version) })
	opened, closed := map[api.CampaignID]bool{}, map[api.CampaignID]bool{}
	var last RolloutTrace
	for _, l := range changes {
		r.gaps += int(max(l.Version-last.Version-1, 0))
		switch {
		case l.Version == last.Version:
			r.failf("version %d was written twice: %s and %s", l.Version, last.Action, l.Action)
		case l.Version == last.Version+1 && last.After != nil && !follows(last.After, l.Before):
			r.failf("version %d finds %+v, it was %+v", l.Version, l.Before, *last.After)
		}
		if l.Before != nil {
			r.change(&l)
		} else if l.Action != string(rollout.Start) {
			r.failf("version %d is of nothing, by %s", l.Version, l.Action)
		}
		switch l.Action {
		case string(rollout.Open):
			opened[l.After.Campaign] = true
		case string(rollout.Closed):
			closed[l.Before.Campaign] = true
		}
		last = l
	}
	r.gaps = max(r.gaps-quiet, 0)
	rep.RolloutGaps += r.gaps
	for _, id := range slices.Sorted(maps.Keys(closed)) {
		if c := camps[id]; c != nil && !c.over() {
			r.failf("campaign %s was closed and is not over", id)
		}
	}
	if last.After == nil || r.gaps > 0 {
		return
	}
	for n := 1; ; n++ {
		id := api.RolloutCampaign(r.id, n)
		if n > last.After.Attempt && camps[id] == nil {
			break
		}
		if camps[id] != nil && !opened[id] {
			r.failf("campaign %s was made and never opened", id)
		}
	}
}

// follows reports whether a record is as it was left; it may have another driver.
func follows(was, is *RolloutMark) bool {
	if is == nil {
		return false
	}
	x := *is
	x.Driver = was.Driver
	return x == *was
}

// over reports whether the campaign's last known state is final.
func (c *campaignTrace) over() bool {
	var last CampaignTrace
	for _, l := range c.lines {
		if l.Version > last.Version {
			last = l
		}
	}
	return last.To == "" || last.To.Final()
}

// steps of states that each kind of event may make; the state may stay as it is, too,
// where stays says so.
var rolloutSteps = map[string]struct {
	stays []api.RolloutState
	goes  [][2]api.RolloutState
}{
	string(rollout.Judged): {
		stays: []api.RolloutState{api.RolloutObserving, api.RolloutChanging, api.RolloutBaking},
		goes: [][2]api.RolloutState{
			{api.RolloutObserving, api.RolloutChanging},
			{api.RolloutChanging, api.RolloutReturning},
			{api.RolloutBaking, api.RolloutReturning},
			{api.RolloutBaking, api.RolloutChanging},
			{api.RolloutBaking, api.RolloutObserving},
			{api.RolloutBaking, api.RolloutDone},
		},
	},
	string(rollout.Open):    {stays: []api.RolloutState{api.RolloutChanging, api.RolloutReturning}},
	string(rollout.Closed):  {stays: []api.RolloutState{api.RolloutChanging, api.RolloutReturning}},
	string(rollout.Stalled): {stays: []api.RolloutState{api.RolloutChanging, api.RolloutReturning}},
	string(rollout.Settled): {
		stays: []api.RolloutState{api.RolloutChanging},
		goes: [][2]api.RolloutState{
			{api.RolloutChanging, api.RolloutBaking},
			{api.RolloutChanging, api.RolloutObserving},
			{api.RolloutChanging, api.RolloutDone},
		},
	},
	string(rollout.Returned): {goes: [][2]api.RolloutState{{api.RolloutReturning, api.RolloutHalted}, {api.RolloutReturning, api.RolloutAborted}}},
	string(rollout.Pause):    {stays: []api.RolloutState{api.RolloutObserving, api.RolloutChanging, api.RolloutBaking, api.RolloutReturning}},
	string(rollout.Resume):   {stays: []api.RolloutState{api.RolloutObserving, api.RolloutChanging, api.RolloutBaking, api.RolloutReturning}},
	string(rollout.Abort): {
		stays: []api.RolloutState{api.RolloutReturning},
		goes: [][2]api.RolloutState{
			{api.RolloutObserving, api.RolloutAborted},
			{api.RolloutChanging, api.RolloutReturning},
			{api.RolloutBaking, api.RolloutReturning},
		},
	},
}

// change checks a change of the whole by itself.
func (r *rolloutTrace) change(l *RolloutTrace) {
	a, b := l.Before, l.After
	step, known := rolloutSteps[l.Action]
	moved := a.State != b.State
	switch {
	case a.State.Final():
		r.failf("version %d changes it by %s, it is %s", l.Version, l.Action, a.State)
	case !known && moved,
		known && moved && !slices.Contains(step.goes, [2]api.RolloutState{a.State, b.State}),
		known && !moved && !slices.Contains(step.stays, a.State):
		r.failf("version %d makes it %s of %s, by %s", l.Version, b.State, a.State, l.Action)
	}
	entered := b.Wave == a.Wave+1 && (l.Action == string(rollout.Judged) || l.Action == string(rollout.Settled))
	switch {
	case b.Wave != a.Wave && !entered:
		r.failf("version %d goes from wave %d to %d, by %s", l.Version, a.Wave, b.Wave, l.Action)
	case b.Wave > b.Waves:
		r.failf("version %d is in wave %d of %d", l.Version, b.Wave, b.Waves)
	}
	byOrder := l.Action == string(rollout.Pause) || l.Action == string(rollout.Resume) || l.Action == string(rollout.Abort)
	if known && !byOrder && a.Driver != l.By {
		r.failf("%s drives it by %s, the driver is %q", l.By, l.Action, a.Driver)
	}
	r.campaign(l)
	left := a.Counts.Changing + a.Counts.Returning
	switch {
	case l.Action == string(rollout.Settled) && a.Current.Pending+a.Current.Changing+a.Current.Returning > 0:
		r.failf("wave %d is through with %+v", a.Wave, a.Current)
	case (b.State == api.RolloutDone) && (left+a.Counts.Pending+a.Counts.Failed > 0 || a.Wave != a.Waves):
		r.failf("it is %s in wave %d with %+v", b.State, a.Wave, a.Counts)
	case l.Action == string(rollout.Returned) && (left > 0 || a.Campaign != ""):
		r.failf("it is %s with %+v and campaign %q", b.State, a.Counts, a.Campaign)
	case b.State == api.RolloutHalted && !b.Bad:
		r.failf("it is %s and was not found to be worse", b.State)
	}
}

// campaign checks what a change makes of the rollout's campaign.
func (r *rolloutTrace) campaign(l *RolloutTrace) {
	a, b := l.Before, l.After
	switch l.Action {
	case string(rollout.Open):
		switch {
		case a.Campaign != "" || b.Attempt != a.Attempt+1 || b.Campaign != api.RolloutCampaign(r.id, b.Attempt):
			r.failf("campaign %q was opened as attempt %d after %q and %d", b.Campaign, b.Attempt, a.Campaign, a.Attempt)
		case a.Paused || a.Kept:
			r.failf("campaign %s was opened while nothing is to be begun", b.Campaign)
		case b.Back != (a.State == api.RolloutReturning):
			r.failf("campaign %s was opened while it is %s, back: %v", b.Campaign, a.State, b.Back)
		}
	case string(rollout.Closed):
		if a.Campaign == "" || b.Campaign != "" || b.Attempt != a.Attempt {
			r.failf("campaign %q was closed, %q follows", a.Campaign, b.Campaign)
		}
	default:
		if b.Campaign != a.Campaign || b.Attempt != a.Attempt {
			r.failf("version %d makes campaign %q of %q, by %s", l.Version, b.Campaign, a.Campaign, l.Action)
		}
	}
}
