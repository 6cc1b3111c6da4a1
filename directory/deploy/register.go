// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// Registration is what prepare registers. Addresses of the first cell and its aliases
// are the router's own.
type Registration struct {
	First bool
	Host  string
	// Aliases of the shared host; the first cell's only.
	Aliases  []string
	Upstream string // the first cell's only
	ProbeURL string
	Stores
	CredentialHash string
	Bots           []Bot
	// Found is what prepare counted in the cell's stores.
	Found Found
}

// Found are counts of what is in a cell's stores before its rows are written.
type Found struct {
	// Tenancy, FirstRows, ModeRows and SelfRows are rows of the cell's own state.
	Tenancy   int64 `json:"tenancy"`
	FirstRows int64 `json:"first_rows"`
	ModeRows  int64 `json:"mode_rows"`
	SelfRows  int64 `json:"self_rows"`
	// Objects are those under the prefix, prepare's probe apart.
	Objects int64 `json:"objects"`
	// Unnamed are live processes that do not run with the cell's name.
	Unnamed int64 `json:"unnamed"`
}

// Register registers a cell, or checks a rerun against the row. A rerun changes
// nothing, whatever the cell holds by then.
func Register(r Registration) Rule {
	return func(ch *Change) error {
		if err := r.normalize(ch.Cell.Name); err != nil {
			return err
		}
		if ch.Exists {
			return r.rerun(&ch.Cell)
		}
		mode := tenancy.Enforced
		if r.First {
			mode = tenancy.Recording
		}
		ch.Cell = Cell{Name: ch.Cell.Name, Host: r.Host, Aliases: r.Aliases, Upstream: r.Upstream, ProbeURL: r.ProbeURL, Stores: r.Stores,
			State: Attaching, First: r.First, Mode: mode, Modes: []ModeChange{{Mode: mode, At: ch.At}},
			CredentialHash: r.CredentialHash, Bots: r.Bots}
		if err := r.fresh(ch); err != nil {
			return err
		}
		return ch.overlaps()
	}
}

// fresh are the refusals of a cell that the directory has no row for.
func (r *Registration) fresh(ch *Change) error {
	first := slices.IndexFunc(ch.Others, func(c Cell) bool { return c.First })
	switch {
	case r.First && first >= 0:
		return conflict("the first cell is %s", ch.Others[first].Name)
	case !r.First && first < 0:
		return fmt.Errorf("%w: no cell is registered before the first one, the deployment behind the shared host", ErrNoCell)
	}
	f := &r.Found
	if n := f.Tenancy + f.FirstRows + f.ModeRows + f.SelfRows; n > 0 {
		return conflict("the stores of deployment %s hold %d rows of a cell's state, and the directory has no cell of that deployment", r.DeploymentID, n)
	}
	if !r.First && f.Objects > 0 {
		return conflict("%d objects are under the prefix of a cell that is new", f.Objects)
	}
	if !r.First && f.Unnamed > 0 {
		return conflict("%d live processes do not run as cell %s", f.Unnamed, ch.Cell.Name)
	}
	return nil
}

// rerun checks a registration against the cell's row.
func (r *Registration) rerun(c *Cell) error {
	switch {
	case r.First != c.First:
		return conflict("cell %s is registered, and whether it is the first one never changes", c.Name)
	case r.DeploymentID != c.DeploymentID:
		return conflict("cell %s is registered with deployment id %s", c.Name, c.DeploymentID)
	case r.Host != c.Host:
		return conflict("cell %s is registered with host %s", c.Name, c.Host)
	case r.Stores != c.Stores:
		return conflict("cell %s is registered with bucket %q prefix %q", c.Name, c.Bucket, c.Prefix)
	case r.ProbeURL != c.ProbeURL:
		return conflict("cell %s is registered with probe address %s", c.Name, c.ProbeURL)
	case c.First && r.Upstream != c.Upstream:
		return conflict("cell %s is registered with upstream %s", c.Name, c.Upstream)
	case !slices.Contains(c.Hashes(), r.CredentialHash):
		return conflict("the credential's hash is none of cell %s's", c.Name)
	}
	return nil
}

func (r *Registration) normalize(name cells.CellID) error {
	if err := name.Validate(); err != nil {
		return err
	}
	var err error
	if r.Host, err = hostname.Normalize(r.Host); err != nil {
		return invalid("%v", err)
	}
	if !r.First && (len(r.Aliases) > 0 || r.Upstream != "") {
		return invalid("aliases and upstream are the first cell's only")
	}
	r.Aliases = slices.Clone(r.Aliases)
	for i, a := range r.Aliases {
		if r.Aliases[i], err = hostname.Normalize(a); err != nil {
			return invalid("alias: %v", err)
		}
	}
	if r.First {
		if r.Upstream, err = NormalUpstream(r.Upstream); err != nil {
			return err
		}
	}
	if r.ProbeURL, err = NormalProbeURL(r.ProbeURL); err != nil {
		return err
	}
	if r.DeploymentID == "" || len(r.DeploymentID) > 128 || r.Prefix != "" && r.Bucket == "" {
		return invalid("stores: a deployment id of 1 to 128 bytes is needed, and a bucket for a prefix")
	}
	return checkHash(r.CredentialHash)
}

func checkHash(h string) error {
	if _, err := credential.ParseHash(h); err != nil {
		return invalid("%v; make both with cell credential new", err)
	}
	return nil
}

// NormalUpstream is an upstream's one spelling: http(s)://host[:port]. The error wraps
// [cells.ErrInvalid].
func NormalUpstream(raw string) (string, error) { return address("upstream", raw) }

// NormalProbeURL is a probe address's one spelling, of the same form. The error wraps
// [cells.ErrInvalid].
func NormalProbeURL(raw string) (string, error) { return address("probe address", raw) }

// address is the one spelling of an address. Its errors do not quote what may hold a
// password.
func address(what, raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" ||
		u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || u.Opaque != "" {
		return "", invalid("%s is not http(s)://host[:port]", what)
	}
	h, port := u.Hostname(), u.Port()
	if strings.Contains(h, ":") {
		h = "[" + h + "]"
	}
	if h, err = hostname.Normalize(h); err != nil {
		return "", invalid("%s: %v", what, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); port != "" && (err != nil || n == 0) {
		return "", invalid("%s: the port is no port", what)
	}
	if port != "" && port != map[string]string{"http": "80", "https": "443"}[u.Scheme] {
		h += ":" + port
	}
	return u.Scheme + "://" + h, nil
}
