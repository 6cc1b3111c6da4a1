// SPDX-License-Identifier: Apache-2.0

// Package wire is what a router's own paths take and answer: lookups for clients,
// placements and state reads for cells, and the operator's changes of the directory of
// deployments. Documents are JSON; refusals are problem documents with a code of the
// closed list, which is what callers match. It does no I/O.
package wire

import (
	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/stores"
)

// Paths. Everything else below /cells/ is NOT_SERVED and never reaches a cell.
const (
	PathLookup     = "/cells/lookup"        // GET ?tenant= -> Lookup; no credential, rate-limited
	PathPlacements = "/cells/v1/placements" // POST Place -> Winner; with a cell's credential or the operator's
	PathCells      = "/cells/v1/cells"      // GET {cell} -> CellState, with that cell's credential
	// PathOperator is for the operator credential:
	// GET directory -> deploy.View; GET placements?cell=&after=&limit= -> Placements;
	// GET audit?after=&limit=&tenant= -> api.AuditList;
	// POST cells/{cell}/register, limit, credential, attach, held, mode, serve, config,
	// addresses -> deploy.Cell; POST repoint -> deploy.Placement.
	PathOperator = "/cells/v1/operator"
)

// MaxBody is the largest request body, in bytes; MaxHeld that of an attach, which may
// name a million tenants.
const (
	MaxBody = 1 << 20
	MaxHeld = 64 << 20
)

// Place asks for a tenant's placement. A cell names itself; an operator any cell.
type Place struct {
	Tenant cells.TenantID `json:"tenant"`
	Cell   cells.CellID   `json:"cell"`
	// Fingerprint is the configuration of the process or command that asks.
	Fingerprint *tenancy.Fingerprint `json:"fingerprint,omitempty"`
	Actor       string               `json:"actor,omitempty"`
}

// Winner says where a tenant is placed, whoever asked first.
type Winner struct {
	Tenant       cells.TenantID `json:"tenant"`
	Cell         cells.CellID   `json:"cell"`
	DeploymentID string         `json:"deployment_id"`
	// Created: this call placed it.
	Created bool `json:"created"`
}

// CellState is what the first cell reads of itself while it records.
type CellState struct {
	Cell  cells.CellID `json:"cell"`
	State deploy.State `json:"state"`
	Mode  tenancy.Mode `json:"mode"`
}

// Lookup is a tenant's cell. A tenant that is placed nowhere has the first cell's, in
// the same words.
type Lookup struct {
	Tenant cells.TenantID `json:"tenant"`
	Cell   cells.CellID   `json:"cell"`
	Host   string         `json:"host"`
}

// Placements are a page, in order of their tenants; Next is the `after` of the next one.
type Placements struct {
	Placements []deploy.Placement `json:"placements"`
	Next       cells.TenantID     `json:"next,omitempty"`
}

// Register registers a cell, or checks a rerun.
type Register struct {
	Host string `json:"host"`
	deploy.Stores
	CredentialSHA256 string `json:"credential_sha256"`
	// ProbeURL of a later cell. The first one's is the router's own configuration.
	ProbeURL string `json:"probe_url,omitempty"`
	// Nonces that were written to the cell's stores, by their kinds; its probe listener
	// must answer them.
	Nonces map[stores.Kind]stores.Nonce `json:"nonces"`
	Found  deploy.Found                 `json:"found"`
	Bots   []deploy.Bot                 `json:"bots,omitempty"`
	Actor  string                       `json:"actor,omitempty"`
}

// Limit closes, opens and bounds a cell. Absent members leave what is; PlacementsMax
// below 0 clears the quota.
type Limit struct {
	Closed        *bool  `json:"closed,omitempty"`
	PlacementsMax *int64 `json:"placements_max,omitempty"`
	Actor         string `json:"actor,omitempty"`
}

// Action is a step of a two-valued change.
type Action string

// The steps.
const (
	Next   Action = "next"
	Finish Action = "finish"
	Revert Action = "revert"
)

// Credential rotates a cell's credential. SHA256 only with Next.
type Credential struct {
	Action Action `json:"action"`
	SHA256 string `json:"sha256,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

// Attach is the directory's transaction of an attach.
type Attach struct {
	Current  *tenancy.Fingerprint `json:"current"`
	Next     *tenancy.Fingerprint `json:"next,omitempty"`
	KeysFP   string               `json:"keys_fp"`
	Upstream string               `json:"upstream,omitempty"`
	Bots     []deploy.Bot         `json:"bots,omitempty"`
	// Tenants that the first cell holds.
	Tenants []cells.TenantID `json:"tenants,omitempty"`
	Actor   string           `json:"actor,omitempty"`
}

// Held are further tenants that the first cell holds.
type Held struct {
	Tenants []cells.TenantID `json:"tenants"`
	Actor   string           `json:"actor,omitempty"`
}

// Mode records a mode that is about to be raised.
type Mode struct {
	Mode  tenancy.Mode `json:"mode"`
	Actor string       `json:"actor,omitempty"`
}

// Serve ends an attach.
type Serve struct {
	Actor string `json:"actor,omitempty"`
}

// Config changes a cell's configuration; Value is the next one in each step.
type Config struct {
	Action Action               `json:"action"`
	Value  *tenancy.Fingerprint `json:"value"`
	Actor  string               `json:"actor,omitempty"`
}

// Addresses replaces a later cell's probe address, or brings the first cell's to this
// router's configuration (ProbeURL is empty then). Nonces as for Register.
type Addresses struct {
	ProbeURL string                       `json:"probe_url,omitempty"`
	Nonces   map[stores.Kind]stores.Nonce `json:"nonces"`
	Actor    string                       `json:"actor,omitempty"`
}

// Repoint makes a placement follow a move, in a movable directory.
type Repoint struct {
	Tenant cells.TenantID `json:"tenant"`
	From   cells.CellID   `json:"from"`
	To     cells.CellID   `json:"to"`
	Epoch  cells.Epoch    `json:"epoch"`
	Move   cells.MoveID   `json:"move"`
	Actor  string         `json:"actor,omitempty"`
}
