// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// smallDisk mounts a disk of so many MiB at dir, for as long as the test runs.
func smallDisk(t *testing.T, dir string, mib int) {
	t.Helper()
	if err := mountDisk(t, dir, mib); err != nil {
		t.Skipf("a small disk needs the right to mount one: %v", err)
	}
}

// mountDisk is smallDisk for who can do without: the error is that it may not be mounted.
func mountDisk(t *testing.T, dir string, mib int) error {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
		return err
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return nil
}

// fillDisk writes until nothing more fits and returns what frees the space.
func fillDisk(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1 << 20, 64 << 10, 4 << 10, 1} {
		b := make([]byte, n)
		for err = nil; err == nil; {
			_, err = f.Write(b)
		}
	}
	if err := f.Close(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return func() { _ = os.Remove(path) }
}

// A cell whose disk is full says so, loses nothing that it acknowledged, does not
// touch the other cell, and goes on when there is room. A move into it fails and
// leaves the tenant where it is.
func TestFullDisk(t *testing.T) {
	parent, err := os.MkdirTemp("", "cell-disk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(parent) })
	full := filepath.Join(parent, "state", "cells", "cell-b")
	smallDisk(t, full, 8)
	e := startIn(t, parent, fleet.Config{})
	a, b := e.tenant("healthy", "cell-a"), e.tenant("cramped", "cell-b")
	if err := a.Fill(t.Context(), "n", 2000, 2000, func(int) {}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Set(t.Context(), "n", "k", "kept", -1); err != nil {
		t.Fatal(err)
	}
	free := fillDisk(t, full)
	acked := "kept"
	var refused *load.StatusError
	e.eventually("a write is refused", 20*time.Second, func() bool {
		value := strings.Repeat("y", 100_000)
		if _, err := b.Set(t.Context(), "n", "k", value, -1); errors.As(err, &refused) {
			return true
		}
		acked = value
		return false
	})
	if refused.Code != "BACKEND_UNAVAILABLE" {
		t.Errorf("a full disk answers %v", refused)
	}
	if _, err := a.Set(t.Context(), "n", "other", 1, -1); err != nil {
		t.Errorf("the other cell: %v", err)
	}
	mv := e.startMove("healthy", "cell-b", "into-full")
	e.eventually("the move into the full cell gets nowhere, or is given up", 60*time.Second, func() bool {
		m, err := e.cl.MoveByID(t.Context(), mv.ID)
		return err == nil && (m.State.Final() || m.Error != "")
	})
	if _, err := a.Set(t.Context(), "n", "other", 2, -1); err != nil {
		t.Errorf("the tenant that could not move: %v", err)
	}
	free()
	e.eventually("writes are taken again", 20*time.Second, func() bool {
		_, err := b.Set(t.Context(), "n", "k2", 1, -1)
		return err == nil
	})
	if it, err := b.Get(t.Context(), "n", "k"); err != nil || string(it.Value) != `"`+acked+`"` {
		t.Errorf("the last acknowledged value is gone: %v", err)
	}
	e.settle(mv.ID)
	if it, err := a.Get(t.Context(), "n", "other"); err != nil || string(it.Value) != "2" {
		t.Errorf("the moved tenant: %v %s", err, it.Value)
	}
}
