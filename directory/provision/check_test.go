// SPDX-License-Identifier: Apache-2.0

package provision

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func good() Spec {
	return Spec{Cell: "c1", Version: "v1", Command: []string{"memory"}, Replicas: 2, Desired: DesiredServing,
		Store: StoreSpec{Engine: EnginePostgres, DSN: SecretRef{Name: "db", Key: "url"}},
		Env:   map[string]string{"LOG": "debug"}, Secrets: map[string]SecretRef{"TOKEN": {Name: "s", Key: "k"}}}
}

func TestSpecValidate(t *testing.T) {
	s := good()
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Spec){
		"cell":             func(s *Spec) { s.Cell = "C" },
		"no version":       func(s *Spec) { s.Version = "" },
		"version":          func(s *Spec) { s.Version = "v1/../x" },
		"version too long": func(s *Spec) { s.Version = strings.Repeat("v", 64) },
		"image":            func(s *Spec) { s.Image = "a b" },
		"command":          func(s *Spec) { s.Command = []string{""} },
		"long command":     func(s *Spec) { s.Command = make([]string, 65) },
		"no replicas":      func(s *Spec) { s.Replicas = 0 },
		"many replicas":    func(s *Spec) { s.Replicas = 65 },
		"engine":           func(s *Spec) { s.Store.Engine = "oracle" },
		"size":             func(s *Spec) { s.Store.Size = "10 Gi" },
		"dsn":              func(s *Spec) { s.Store.DSN.Key = "../x" },
		"dsn of sqlite":    func(s *Spec) { s.Store.Engine = EngineSQLite },
		"variable":         func(s *Spec) { s.Env["A B"] = "" },
		"own variable":     func(s *Spec) { s.Env["CELL_ID"] = "other" },
		"own secret":       func(s *Spec) { s.Secrets["CELL_CHANNEL_KEY"] = SecretRef{Name: "s", Key: "k"} },
		"twice":            func(s *Spec) { s.Env["TOKEN"] = "x" },
		"secret's name":    func(s *Spec) { s.Secrets["X"] = SecretRef{Name: "../etc", Key: "k"} },
		"dots":             func(s *Spec) { s.Secrets["X"] = SecretRef{Name: "a..b", Key: "k"} },
		"long value":       func(s *Spec) { s.Env["X"] = strings.Repeat("x", MaxValue+1) },
		"geography":        func(s *Spec) { s.Geography = "a\nb" },
		"desired":          func(s *Spec) { s.Desired = "gone" },
	} {
		s := good()
		spoil(&s)
		if err := s.Validate(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}

func TestVersionValidate(t *testing.T) {
	for _, v := range []Version{{Name: "v1"}, {Name: "-v", Command: []string{"x"}}, {Name: "v", Image: "x y"}} {
		if err := v.Validate(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%+v: %v, want ErrInvalid", v, err)
		}
	}
	if err := (&Version{Name: "v1.2_3-x", Image: "registry:5000/memory@sha256:00"}).Validate(); err != nil {
		t.Error(err)
	}
}

func TestExpand(t *testing.T) {
	words := map[string]string{"a": "1", "dsn": "{b}"}
	for in, want := range map[string]string{"": "", "x": "x", "{a}{a}": "11", "-{dsn}-": "-{b}-"} {
		if got, err := Expand(in, words); err != nil || got != want {
			t.Errorf("%q gives %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"{", "{c}", "x{a", "{}"} {
		if got, err := Expand(in, words); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q gives %q, %v; want ErrInvalid", in, got, err)
		}
	}
}

func TestReached(t *testing.T) {
	spec := good()
	spec.Generation = 3
	for _, c := range []struct {
		desired Desired
		st      Status
		want    bool
	}{
		{DesiredServing, Status{ObservedGeneration: 3, Phase: PhaseRunning, Version: "v1"}, true},
		{DesiredServing, Status{ObservedGeneration: 2, Phase: PhaseRunning, Version: "v1"}, false},
		{DesiredServing, Status{ObservedGeneration: 3, Phase: PhaseRunning, Version: "v0"}, false},
		{DesiredServing, Status{ObservedGeneration: 3, Phase: PhaseUpgrading, Version: "v1"}, false},
		{DesiredDrained, Status{ObservedGeneration: 3, Phase: PhaseDraining}, true},
		{DesiredDrained, Status{ObservedGeneration: 3, Phase: PhaseRunning, Version: "v1"}, false},
		{DesiredRetired, Status{ObservedGeneration: 3, Phase: PhaseRetired}, true},
		{DesiredRetired, Status{ObservedGeneration: 3, Phase: PhaseRetiring}, false},
		{"", Status{ObservedGeneration: 3, Phase: PhaseRetired}, false},
	} {
		spec.Desired = c.desired
		if got := c.st.Reached(&spec); got != c.want {
			t.Errorf("%s, %+v: %v", c.desired, c.st, got)
		}
	}
}
