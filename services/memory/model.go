// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cloister-dev/cloister/cells"
)

// Bounds of what a request may carry.
const (
	MaxNamespace = 128     // bytes
	MaxKey       = 512     // bytes
	MaxValue     = 1 << 20 // bytes of JSON
	MaxBulk      = 1000    // items in one bulk request
	MaxPage      = 1000    // items in one page
	maxBody      = 16 << 20
	maxAnswer    = 16 << 20 // bytes of values in one answer
)

// Ref names one memory of the tenant.
type Ref struct {
	Namespace string `json:"namespace"`
	Key       string `json:"key"`
}

// Validate reports a namespace or key that is empty, too long, not UTF-8 or has
// a NUL in it. The error wraps [ErrBadRequest].
func (r Ref) Validate() error {
	if err := validName("namespace", r.Namespace, MaxNamespace); err != nil {
		return err
	}
	return validName("key", r.Key, MaxKey)
}

func validName(what, s string, most int) error {
	switch {
	case s == "":
		return fmt.Errorf("%w: %s is empty", ErrBadRequest, what)
	case len(s) > most:
		return fmt.Errorf("%w: %s has %d bytes; at most %d are allowed", ErrBadRequest, what, len(s), most)
	case !utf8.ValidString(s) || strings.ContainsRune(s, 0):
		return fmt.Errorf("%w: %s must be UTF-8 without NUL", ErrBadRequest, what)
	}
	return nil
}

// Item is one version of one memory.
type Item struct {
	Ref
	// Value is JSON, kept as it was sent; absent in answers to writes.
	Value json.RawMessage `json:"value,omitempty"`
	// Version starts at 1 and grows by one with each change of the key, deletions
	// included, for ever and across cells.
	Version int64 `json:"version"`
	// EventSeq is the tenant's event that announced this version.
	EventSeq cells.EventSeq `json:"event_seq"`
	// Epoch and Cell are those that this version was written at and in.
	Epoch   cells.Epoch  `json:"epoch"`
	Cell    cells.CellID `json:"cell,omitempty"`
	Deleted bool         `json:"deleted,omitempty"`
	At      time.Time    `json:"updated_at"`
}

// Write is one change of one memory.
type Write struct {
	Ref
	Value json.RawMessage `json:"value"`
	// IfVersion, if set, is the version that the memory must be at: 0 means that
	// there must be none (never written, or deleted).
	IfVersion *int64 `json:"if_version"`
	// Delete leaves a tombstone instead of a value.
	Delete bool `json:"-"`
}

// Errors of the service itself.
var (
	// ErrBadRequest: the request breaks a bound or a rule; nothing ran.
	ErrBadRequest = errors.New("memory: bad request")
	// ErrNoItem: there is no such memory.
	ErrNoItem = errors.New("memory: no such memory")
)

// VersionConflict says that if_version did not hold. Nothing was written.
type VersionConflict struct {
	Ref
	Want, Have int64
}

// Error implements error.
func (e *VersionConflict) Error() string {
	return fmt.Sprintf("memory: %s/%s is at version %d, not %d", e.Namespace, e.Key, e.Have, e.Want)
}

// live is the version that if_version is compared with.
func (i Item) live() int64 {
	if i.Deleted {
		return 0
	}
	return i.Version
}
