// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/directory/api"
)

// Waves puts units into waves, in an order that follows from their names and the
// settings alone: first the canaries as they are listed, then all others by a hash of
// the seed and the name. Wave k ends where so many percent of all units are in it and
// the waves before it, and has a unit more than the one before as long as there are
// any; all canaries are in the first. The units' Pos, Wave and State are set; what is
// returned is in that order. Fewer waves than settings are returned when there are
// fewer units than waves.
func Waves(s *api.RolloutSettings, units []api.RolloutUnit) ([]api.RolloutUnit, []api.RolloutWave) {
	first := make(map[string]int, len(s.Canary))
	for i, c := range s.Canary {
		first[c] = i + 1
	}
	type ranked struct {
		api.RolloutUnit
		canary int
		hash   uint64
	}
	list := make([]ranked, len(units))
	canaries := 0
	for i, u := range units {
		list[i] = ranked{u, len(s.Canary) + 1, rank(s.Seed, u.Unit)}
		if c, ok := first[u.Unit]; ok {
			list[i].canary = c
			canaries++
		}
	}
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.canary, b.canary), cmp.Compare(a.hash, b.hash), strings.Compare(a.Unit, b.Unit))
	})
	out := make([]api.RolloutUnit, 0, len(list))
	var waves []api.RolloutWave
	for _, percent := range s.Waves {
		if len(out) == len(list) {
			break
		}
		end := max(int(math.Ceil(percent/100*float64(len(list))-1e-9)), len(out)+1)
		if len(waves) == 0 {
			end = max(end, canaries)
		}
		if percent == 100 {
			end = len(list)
		}
		w := api.RolloutWave{Percent: percent}
		for _, u := range list[len(out):min(end, len(list))] {
			u.Pos, u.Wave, u.State = int64(len(out)+1), len(waves)+1, api.UnitPending
			out = append(out, u.RolloutUnit)
			w.Counts.Total++
			w.Counts.Pending++
		}
		waves = append(waves, w)
	}
	return out, waves
}

// rank orders units: the same on every machine, and of no use to foresee without the
// seed which tenant comes first.
func rank(seed uint64, unit string) uint64 {
	b := binary.BigEndian.AppendUint64(nil, seed)
	sum := sha256.Sum256(append(b, unit...))
	return binary.BigEndian.Uint64(sum[:])
}
