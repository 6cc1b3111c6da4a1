// SPDX-License-Identifier: Apache-2.0

// Package channeltest makes fleets for tests: a real CA and real certificates in
// a temporary folder. Nothing in it weakens a check of package channel.
package channeltest

import (
	"io"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/channel/pki"
)

// Fleet is a fleet's CA for one test.
type Fleet struct {
	*pki.Authority
	dir string
}

// New makes a fleet's CA below tb.TempDir.
func New(tb testing.TB, fleet string) *Fleet {
	tb.Helper()
	dir := tb.TempDir()
	a, err := pki.NewAuthority(filepath.Join(dir, "ca"), fleet, pki.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	return &Fleet{Authority: a, dir: dir}
}

// Config issues a certificate for a member of the fleet, or finds the one that
// was issued before, and returns the configuration of its end of the channel. It
// looks at the files at every use and logs nothing.
func (f *Fleet) Config(tb testing.TB, role channel.Role, name string) channel.Config {
	tb.Helper()
	dir := filepath.Join(f.dir, "issued")
	base := filepath.Join(dir, string(role)+"-"+name)
	if m, _ := filepath.Glob(base + ".crt"); len(m) == 0 {
		if _, err := f.Issue(channel.Identity{Role: role, Name: name}, pki.IssueOptions{Dir: dir}); err != nil {
			tb.Fatal(err)
		}
	}
	return channel.Config{
		CAFile: f.CAFile(), CertFile: base + ".crt", KeyFile: base + ".key", RevokedFile: f.RevokedFile(),
		ReloadEvery: -1, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
}

// Open opens the end of the channel that Config describes.
func (f *Fleet) Open(tb testing.TB, role channel.Role, name string) *channel.Channel {
	tb.Helper()
	c, err := channel.Open(f.Config(tb, role, name))
	if err != nil {
		tb.Fatal(err)
	}
	return c
}
