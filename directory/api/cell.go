// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"net/netip"
	"net/url"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// CellState is how far a cell is in its life.
type CellState string

const (
	// CellAttaching: the cell is registered and may be reached, but takes neither
	// placements nor moves.
	CellAttaching CellState = "attaching"
	// CellServing: the cell takes placements and moves unless it is closed or full.
	CellServing CellState = "serving"
	// CellRetiring: the cell has no tenants any more and is being removed. It is set by
	// the retirement of a provisioned cell alone, and cannot be changed.
	CellRetiring CellState = "retiring"
)

// CellSpec is what an operator says of a cell. A PUT replaces all of it.
type CellSpec struct {
	// Host is the cell's own public host name, without a port; unique among the
	// hosts and aliases of all cells. "" when the cell has none.
	Host string `json:"host,omitempty"`
	// Aliases are further hosts of the cell, unique in the same way.
	Aliases []string `json:"aliases,omitempty"`
	// Issuers are the token issuers that this cell alone accepts.
	Issuers []string `json:"issuers,omitempty"`
	// Jurisdiction is where the cell's data is, legally: a tenant that has a jurisdiction is
	// placed in and moved to cells of the same only. Geography is a label for people.
	Jurisdiction string `json:"jurisdiction,omitempty"`
	Geography    string `json:"geography,omitempty"`
	// Version is the version that the cell is pinned to; informational.
	Version string `json:"version,omitempty"`
	// Upstream, if set, is the one address at which edges reach the cell, in place
	// of its processes' own: http or https, no path, no userinfo.
	Upstream string `json:"upstream,omitempty"`
	// State; "" means CellServing.
	State CellState `json:"state,omitempty"`
	// Closed cells keep their tenants and take no new ones.
	Closed bool `json:"closed,omitempty"`
	// PlacementsMax bounds the cell's tenants; nil is no bound. It is counted in
	// the transaction of each claim, so concurrent claims never pass it.
	PlacementsMax *int64 `json:"placements_max,omitempty"`
	// RowsMax, BytesMax and LoadMax (requests a second) bound what is put into the cell,
	// by the last measures, when it is planned and when each move or placement begins;
	// nil is no bound. A tenant that was never measured counts as one row of one byte.
	RowsMax  *int64   `json:"rows_max,omitempty"`
	BytesMax *int64   `json:"bytes_max,omitempty"`
	LoadMax  *float64 `json:"load_max,omitempty"`
	// Default: the cell serves tenants that have no route. At most one cell.
	Default bool `json:"default,omitempty"`
	// Revision, if not 0, must be the cell's present one, else the PUT is refused
	// as a conflict. It guards read-modify-write.
	Revision int64 `json:"revision,omitempty"`
}

// Cell is a registered cell.
type Cell struct {
	ID cells.CellID `json:"id"`
	CellSpec
	// Tenants counts the tenants placed in the cell, claims that are under way and
	// moves that are coming in. Read-only.
	Tenants   int64     `json:"tenants"`
	CreatedAt time.Time `json:"created_at,omitzero"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
}

// Open reports whether the cell takes new tenants, its quota apart.
func (c *Cell) Open() bool { return c.State == CellServing && !c.Closed }

// View is what policies and rules of placement see of the cell.
func (c *Cell) View() cells.CellView {
	return cells.CellView{Cell: c.ID, Jurisdiction: c.Jurisdiction, Closed: !c.Open(),
		Limits: cells.Limits{Tenants: c.PlacementsMax, Rows: c.RowsMax, Bytes: c.BytesMax, Load: c.LoadMax}}
}

// Full reports whether the quota is reached.
func (c *Cell) Full() bool { return c.PlacementsMax != nil && c.Tenants >= *c.PlacementsMax }

// CellList answers GET PathCells, in order of the ids.
type CellList struct {
	Cells []Cell `json:"cells"`
}

// Normalize fills defaults, lowers host names and reports what is malformed; the
// error wraps [cells.ErrInvalid].
func (s *CellSpec) Normalize() error {
	var err error
	if s.Host != "" {
		if s.Host, err = normalHost(s.Host); err != nil {
			return err
		}
	}
	for i, a := range s.Aliases {
		if s.Aliases[i], err = normalHost(a); err != nil {
			return err
		}
	}
	if len(s.Aliases) > 32 || len(s.Issuers) > 32 {
		return fmt.Errorf("%w: a cell has at most 32 aliases and 32 issuers", cells.ErrInvalid)
	}
	for _, i := range s.Issuers {
		if i == "" || len(i) > 512 {
			return fmt.Errorf("%w: an issuer has 1 to 512 bytes", cells.ErrInvalid)
		}
	}
	for name, v := range map[string]string{"jurisdiction": s.Jurisdiction, "geography": s.Geography, "version": s.Version} {
		if err := checkText(name, v, 128); err != nil {
			return err
		}
	}
	if s.Upstream != "" {
		if s.Upstream, err = normalUpstream(s.Upstream); err != nil {
			return err
		}
	}
	switch s.State {
	case "":
		s.State = CellServing
	case CellAttaching, CellServing:
	default:
		return fmt.Errorf("%w: cell state %q, want %q or %q", cells.ErrInvalid, s.State, CellAttaching, CellServing)
	}
	if s.PlacementsMax != nil && *s.PlacementsMax < 0 {
		return fmt.Errorf("%w: placements_max is negative", cells.ErrInvalid)
	}
	if s.RowsMax != nil && *s.RowsMax < 0 || s.BytesMax != nil && *s.BytesMax < 0 || s.LoadMax != nil && !(*s.LoadMax >= 0) {
		return fmt.Errorf("%w: rows_max, bytes_max or load_max is negative", cells.ErrInvalid)
	}
	return nil
}

// normalHost returns the host as package hostname compares it. A port is refused.
func normalHost(h string) (string, error) {
	if a, err := netip.ParseAddr(h); err == nil && a.Is6() {
		h = "[" + h + "]"
	}
	n, err := hostname.Normalize(h)
	if err != nil {
		return "", fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	if name, _ := hostname.WithoutPort(h); name != h {
		return "", fmt.Errorf("%w: host %q is not a host name without a port", cells.ErrInvalid, h)
	}
	return n, nil
}

func normalUpstream(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil ||
		(u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("%w: upstream is not http(s)://host[:port]", cells.ErrInvalid)
	}
	return u.Scheme + "://" + u.Host, nil
}

func checkText(name, v string, limit int) error {
	if len(v) > limit {
		return fmt.Errorf("%w: %s has %d bytes, at most %d", cells.ErrInvalid, name, len(v), limit)
	}
	for _, r := range v {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return fmt.Errorf("%w: %s has a control character", cells.ErrInvalid, name)
		}
	}
	return nil
}
