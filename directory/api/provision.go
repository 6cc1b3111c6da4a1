// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/provision"
)

// VersionRequest is the body of PUT PathVersions/{name}.
type VersionRequest struct {
	Image   string   `json:"image,omitempty"`
	Command []string `json:"command,omitempty"`
	// Replace puts it in the place of one that says something else; cells that are pinned
	// to that keep what they have until they are upgraded again.
	Replace bool   `json:"replace,omitempty"`
	Actor   string `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *VersionRequest) Normalize() error { return normalizeAsked(&r.Actor, "") }

// VersionList answers GET PathVersions, in order of the names.
type VersionList struct {
	Versions []provision.Version `json:"versions"`
}

// ProvisionRequest is the body of PUT PathProvisioned/{cell}: what the cell should
// be, all of it. A drained cell serves again by it.
type ProvisionRequest struct {
	// Version is looked up in the catalogue, unless Image or Command are given.
	Version string   `json:"version"`
	Image   string   `json:"image,omitempty"`
	Command []string `json:"command,omitempty"`
	// Replicas; 0 means 1.
	Replicas     int                            `json:"replicas,omitempty"`
	Store        provision.StoreSpec            `json:"store,omitzero"`
	Jurisdiction string                         `json:"jurisdiction,omitempty"`
	Geography    string                         `json:"geography,omitempty"`
	Host         string                         `json:"host,omitempty"`
	Env          map[string]string              `json:"env,omitempty"`
	Secrets      map[string]provision.SecretRef `json:"secrets,omitempty"`
	Reason       string                         `json:"reason,omitempty"`
	Actor        string                         `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed beside what [ProvisionRequest.Spec]
// has; the error wraps [cells.ErrInvalid].
func (r *ProvisionRequest) Normalize() error {
	if r.Replicas == 0 {
		r.Replicas = 1
	}
	if len(r.Env) == 0 {
		r.Env = nil
	}
	if len(r.Secrets) == 0 {
		r.Secrets = nil
	}
	if len(r.Command) == 0 {
		r.Command = nil
	}
	var err error
	if r.Host != "" {
		if r.Host, err = normalHost(r.Host); err != nil {
			return err
		}
	}
	if err := checkText("reason", r.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// Spec is the wish as a spec without a generation; the error wraps [cells.ErrInvalid].
func (r *ProvisionRequest) Spec(cell cells.CellID) (provision.Spec, error) {
	s := provision.Spec{Cell: cell, Version: r.Version, Image: r.Image, Command: r.Command, Replicas: r.Replicas, Store: r.Store,
		Jurisdiction: r.Jurisdiction, Geography: r.Geography, Host: r.Host, Env: r.Env, Secrets: r.Secrets, Desired: provision.DesiredServing}
	return s, s.Validate()
}

// UpgradeRequest is the body of POST PathProvisioned/{cell}/upgrade.
type UpgradeRequest struct {
	// Version of the catalogue; "" keeps the version.
	Version string `json:"version,omitempty"`
	// Replicas; 0 keeps their number.
	Replicas int    `json:"replicas,omitempty"`
	Reason   string `json:"reason,omitempty"`
	Actor    string `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *UpgradeRequest) Normalize() error {
	if r.Version == "" && r.Replicas == 0 {
		return fmt.Errorf("%w: an upgrade names a version, or a number of replicas", cells.ErrInvalid)
	}
	if err := checkText("reason", r.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// DrainRequest is the body of POST PathProvisioned/{cell}/drain. Repeated, once the
// campaign is over and tenants are left, it plans another.
type DrainRequest struct {
	// Into are the cells to move the tenants to; none means all that are open.
	Into []cells.CellID `json:"into,omitempty"`
	// Settings of the campaign.
	Settings CampaignSettings `json:"settings"`
	Reason   string           `json:"reason,omitempty"`
	Actor    string           `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *DrainRequest) Normalize() error {
	for _, c := range r.Into {
		if err := c.Validate(); err != nil {
			return err
		}
	}
	if err := r.Settings.Normalize(); err != nil {
		return err
	}
	if err := checkText("reason", r.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// RetireRequest is the body of POST PathProvisioned/{cell}/retire.
type RetireRequest struct {
	// Force retires a cell whose own stores cannot be asked. It does not retire one that
	// the directory, or a store that answers, has a tenant of. Who forced is kept.
	Force  bool   `json:"force,omitempty"`
	Reason string `json:"reason,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *RetireRequest) Normalize() error {
	if err := checkText("reason", r.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// LeftTenant is a tenant that keeps a cell from being retired.
type LeftTenant struct {
	Tenant cells.TenantID `json:"tenant"`
	// Why says what of it is left.
	Why string `json:"why"`
}

// CellLeft is what keeps a cell from being retired.
type CellLeft struct {
	// Directory are tenants that the directory knows in the cell, Store those that the
	// cell's own store knows; at most MaxLeft of each. Total counts all that were found.
	Directory []LeftTenant `json:"directory"`
	Store     []LeftTenant `json:"store"`
	Total     int          `json:"total"`
	// Unasked says why the cell's own store was not asked; "" when it was.
	Unasked string `json:"unasked,omitempty"`
}

// MaxLeft bounds the lists of CellLeft.
const MaxLeft = 100

// Tell says in one line what is left, with the first of it.
func (l *CellLeft) Tell() string {
	const first = 5
	s := fmt.Sprintf("%d left", l.Total)
	list := slices.Concat(l.Directory, l.Store)
	for i, t := range list[:min(len(list), first)] {
		sep := "; "
		if i == 0 {
			sep = ": "
		}
		s += fmt.Sprintf("%s%s %s", sep, t.Tenant, t.Why)
	}
	if l.Total > first {
		s += fmt.Sprintf("; and %d more", l.Total-first)
	}
	return s
}

// ProvisionProgress is how far a wish is, with an estimate.
type ProvisionProgress struct {
	// Reached: the cell is as it should be, tenants of a drained one included.
	Reached bool `json:"reached"`
	// Done of Total: processes, or tenants that are moved.
	Done  int64  `json:"done"`
	Total int64  `json:"total"`
	What  string `json:"what"`
	// Elapsed is since this phase began; Left is by what that took, 0 when nothing is known.
	Elapsed time.Duration `json:"elapsed,omitempty"`
	Left    time.Duration `json:"left,omitempty"`
	// Waiting says what for, if not for processes to be ready.
	Waiting string `json:"waiting,omitempty"`
}

// Provisioned is a cell that is provisioned, as operators see it.
type Provisioned struct {
	provision.Record
	// Cell is how it is registered; nil when it is not (any more).
	Cell *Cell `json:"cell,omitempty"`
	// Drain is the campaign that empties it, or did.
	Drain    *Campaign         `json:"drain,omitempty"`
	Progress ProvisionProgress `json:"progress"`
	// Left is what keeps it from being retired; only where it was asked for, ?left=1.
	Left *CellLeft `json:"left,omitempty"`
}

// ProvisionedList answers GET PathProvisioned, in order of the cells.
type ProvisionedList struct {
	Cells []Provisioned `json:"cells"`
}

// SpecList answers GET PathSpecs: all records, retired cells included.
type SpecList struct {
	// Revision grows with each change of a spec.
	Revision int64              `json:"revision"`
	Records  []provision.Record `json:"records"`
}

// SpecLine is one line of a watch of the specs: all of them, or a sign of life.
type SpecLine struct {
	Specs *SpecList `json:"specs,omitempty"`
	Alive bool      `json:"alive,omitempty"`
}

// LivingList answers GET PathLiving.
type LivingList struct {
	Processes []provision.Live `json:"processes"`
}
