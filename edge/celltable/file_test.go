// SPDX-License-Identifier: Apache-2.0

package celltable_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/rules"
)

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cells.yaml")
	src := celltable.File(path)
	if _, err := src.Table(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
		t.Error("no file:", err)
	}
	put := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := rules.Table{Aliases: []string{"www.example.com"}, Cells: []rules.Cell{
		{Name: "a", Host: "app.example.com", First: true, State: rules.Serving, Upstream: "http://a:1", Issuers: []string{"i", "j"}},
		{Name: "b", Host: "b.example.com", Aliases: []string{"b2.example.com"}, State: rules.Attaching},
	}}
	for name, doc := range map[string]string{
		"YAML": "aliases: [www.example.com]\ncells:\n  - {name: a, host: app.example.com, first: true, state: serving, upstream: \"http://a:1\", issuers: [i, j]}\n  - name: b\n    host: b.example.com\n    aliases: [b2.example.com]\n    state: attaching\n",
		"JSON": `{"aliases":["www.example.com"],"cells":[{"name":"a","host":"app.example.com","first":true,"state":"serving","upstream":"http://a:1","issuers":["i","j"]},{"name":"b","host":"b.example.com","aliases":["b2.example.com"],"state":"attaching"}]}`,
	} {
		put(doc)
		if got, err := src.Table(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v %v", name, got, err)
		}
	}
	for name, doc := range map[string]string{"empty": "", "unknown": "cell: []", "twice": "cells: []\n---\ncells: []", "a list": "[]", "noise": "{", "unknown in a cell": "cells: [{name: a, hosts: [b]}]"} {
		put(doc)
		if got, err := src.Table(t.Context()); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %+v %v", name, got, err)
		}
	}
}
