// SPDX-License-Identifier: Apache-2.0

package celltable

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/edge/rules"
	"github.com/cloister-dev/cloister/internal/sealed"
)

// KeepFiles is how long the file of a replica that is gone is kept.
const KeepFiles = 14 * 24 * time.Hour

// saveEvery is how often a table that does not change is written again, so that its file
// is not taken for that of a replica that is gone.
const saveEvery = 24 * time.Hour

// suffix is that of snapshots, in the shared folder.
const suffix = ".cells"

// maxFiles bounds the files of a folder that are read.
const maxFiles = 1000

var format = sealed.Format{Name: "cloister-cells", Version: 1, Label: "cloister cells snapshot 1"}

type snapshot struct {
	// Replica wrote it, and knew the table to be the directory's at SeenAt.
	Replica string      `json:"replica"`
	SeenAt  time.Time   `json:"seen_at"`
	Shared  string      `json:"shared_host"`
	Table   rules.Table `json:"table"`
}

func fileName(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '.' && c != '-' && c != '_' {
			return false
		}
	}
	return s != "" && len(s) <= 100 && s[0] != '.'
}

// save writes the view, if it is not in the folder yet. Only run calls it.
func (w *Watcher) save() {
	v := w.view.Load()
	w.mu.Lock()
	due := w.dirty || !w.saved.IsZero() && time.Since(w.saved) >= saveEvery && w.last == ""
	w.mu.Unlock()
	if w.cfg.Folder == "" || !due || v == nil || v.source != SourceDirectory {
		return
	}
	path := filepath.Join(w.cfg.Folder, w.cfg.Name+suffix)
	err := format.Write(path, w.cfg.Key, snapshot{Replica: w.cfg.Name, SeenAt: time.Now().Add(-w.Age()).UTC(), Shared: w.cfg.Rules.Shared, Table: v.table})
	w.mu.Lock()
	before := w.unsaved
	if err != nil {
		w.unsaved = err.Error()
	} else {
		w.unsaved, w.dirty, w.saved = "", false, time.Now()
	}
	now := w.unsaved
	w.mu.Unlock()
	if err != nil && now != before {
		w.cfg.Log.Error("celltable: the snapshot was not written; trying again", "path", path, "err", err)
	}
	if err == nil {
		w.prune()
	}
}

// files returns the snapshots of the folder.
func (w *Watcher) files() ([]os.DirEntry, error) {
	d, err := os.Open(w.cfg.Folder)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	all, err := d.ReadDir(maxFiles)
	var out []os.DirEntry
	for _, e := range all {
		if name, ok := strings.CutSuffix(e.Name(), suffix); ok && fileName(name) && e.Type().IsRegular() {
			out = append(out, e)
		}
	}
	if len(out) > 0 {
		err = nil
	}
	return out, err
}

// newest returns the newest file that can be trusted.
func (w *Watcher) newest() (snapshot, error) {
	all, err := w.files()
	if err != nil {
		return snapshot{}, fmt.Errorf("%w: %w", errNoFile, err)
	}
	var best snapshot
	var bad error
	for _, e := range all {
		var s snapshot
		if err := format.Read(filepath.Join(w.cfg.Folder, e.Name()), w.cfg.Key, &s); err != nil {
			bad = errors.Join(bad, err)
			continue
		}
		if s.Shared != w.cfg.Rules.Shared {
			bad = errors.Join(bad, fmt.Errorf("%s is of the shared host %s", e.Name(), s.Shared))
			continue
		}
		if s.SeenAt.After(best.SeenAt) {
			best = s
		}
	}
	if best.SeenAt.IsZero() {
		return best, errors.Join(errNoFile, bad)
	}
	if bad != nil {
		w.cfg.Log.Warn("celltable: snapshots were passed over", "err", bad)
	}
	return best, nil
}

// prune removes the files of replicas that are long gone.
func (w *Watcher) prune() {
	all, err := w.files()
	if err != nil {
		return
	}
	for _, e := range all {
		if info, err := e.Info(); err == nil && e.Name() != w.cfg.Name+suffix && time.Since(info.ModTime()) > KeepFiles {
			_ = os.Remove(filepath.Join(w.cfg.Folder, e.Name()))
		}
	}
}
