// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// Every unit is in one wave, waves grow, canaries come first, and the order in which
// units are listed plays no part.
func TestWavesProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 300).Draw(t, "n")
		var units []api.RolloutUnit
		for i := range n {
			units = append(units, api.RolloutUnit{Unit: fmt.Sprintf("t%d", i), Home: "a"})
		}
		s := &api.RolloutSettings{Version: "v2", By: api.ByMove, Seed: rapid.Uint64().Draw(t, "seed"),
			Waves: rapid.SampledFrom([][]float64{{100}, {1, 10, 50, 100}, {0.1, 0.2, 0.3, 100}, {99, 100}}).Draw(t, "waves")}
		for i := range rapid.IntRange(0, min(n, 5)).Draw(t, "canaries") {
			s.Canary = append(s.Canary, fmt.Sprintf("t%d", i))
		}
		if err := s.Normalize(); err != nil {
			t.Fatal(err)
		}
		got, waves := rollout.Waves(s, units)
		if len(got) != n || len(waves) > len(s.Waves) || len(waves) == 0 {
			t.Fatalf("%d of %d units in %d waves", len(got), n, len(waves))
		}
		seen, sizes := map[string]bool{}, make([]int64, len(waves)+1)
		for i, u := range got {
			if seen[u.Unit] || u.Pos != int64(i+1) || i > 0 && u.Wave < got[i-1].Wave || u.State != api.UnitPending {
				t.Fatalf("unit %d: %+v", i, u)
			}
			seen[u.Unit] = true
			sizes[u.Wave]++
			if i < len(s.Canary) && (u.Unit != s.Canary[i] || u.Wave != 1) {
				t.Fatalf("canary %d is %+v", i, u)
			}
		}
		var sum int64
		for i, w := range waves {
			sum += sizes[i+1]
			if w.Counts.Total != sizes[i+1] || w.Counts.Pending != sizes[i+1] || sizes[i+1] == 0 {
				t.Fatalf("wave %d has %d units, counted %+v", i+1, sizes[i+1], w.Counts)
			}
			if i > 0 && float64(sum) < w.Percent/100*float64(n)-1e-6 {
				t.Fatalf("after wave %d there are %d of %d, want %g%%", i+1, sum, n, w.Percent)
			}
		}
		mixed := slices.Clone(units)
		rand.New(rand.NewPCG(s.Seed, 1)).Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
		if again, _ := rollout.Waves(s, mixed); !reflect.DeepEqual(again, got) {
			t.Fatal("another order of the units gives other waves")
		}
	})
}

// A seed gives the same waves for ever: what a dry run has shown is what happens.
func TestWavesAreStable(t *testing.T) {
	s := &api.RolloutSettings{Version: "v2", By: api.ByMove, Seed: 7, Waves: []float64{20, 100}, Canary: []string{"t3"}}
	var units []api.RolloutUnit
	for i := range 6 {
		units = append(units, api.RolloutUnit{Unit: fmt.Sprintf("t%d", i)})
	}
	got, _ := rollout.Waves(s, units)
	var names []string
	for _, u := range got {
		names = append(names, fmt.Sprintf("%s/%d", u.Unit, u.Wave))
	}
	s.Seed = 8
	other, _ := rollout.Waves(s, units)
	if reflect.DeepEqual(got, other) {
		t.Error("another seed gives the same waves")
	}
	if want := stableWaves; !slices.Equal(names, want) {
		t.Errorf("waves %q, want %q", names, want)
	}
}

func TestRolloutSettingsRefuse(t *testing.T) {
	ok := api.RolloutSettings{Version: "v2", By: api.ByMove}
	if err := ok.Normalize(); err != nil || len(ok.Waves) != 4 || ok.Bake != 10*time.Minute || ok.Patience != ok.Bake {
		t.Fatalf("%+v, %v", ok, err)
	}
	for name, mod := range map[string]func(*api.RolloutSettings){
		"no version": func(s *api.RolloutSettings) { s.Version = "" }, "from itself": func(s *api.RolloutSettings) { s.From = "v2" },
		"by": func(s *api.RolloutSettings) { s.By = "magic" }, "waves fall": func(s *api.RolloutSettings) { s.Waves = []float64{50, 10, 100} },
		"waves stop": func(s *api.RolloutSettings) { s.Waves = []float64{50} }, "wave 0": func(s *api.RolloutSettings) { s.Waves = []float64{0, 100} },
		"bake": func(s *api.RolloutSettings) { s.Bake = -1 }, "return": func(s *api.RolloutSettings) { s.Return = "some" },
		"canary twice": func(s *api.RolloutSettings) { s.Canary = []string{"a", "a"} }, "canary": func(s *api.RolloutSettings) { s.Canary = []string{""} },
		"concurrency": func(s *api.RolloutSettings) { s.Concurrency = 1000 }, "undo": func(s *api.RolloutSettings) { s.UndoWindow = "soon" },
		"force": func(s *api.RolloutSettings) { s.By, s.Force = api.ByUpgrade, true }, "health": func(s *api.RolloutSettings) { s.Health.MinRequests = 1 },
	} {
		s := api.RolloutSettings{Version: "v2", By: api.ByMove}
		mod(&s)
		if err := s.Normalize(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

var stableWaves = []string{"t3/1", "t5/1", "t1/2", "t2/2", "t0/2", "t4/2"}
