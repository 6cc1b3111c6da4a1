// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/hostname"
)

// State is a cell's state in the directory. A cell of either state is routed to.
type State string

// The states of a cell.
const (
	// Attaching: registered by prepare, and not yet through attach.
	Attaching State = "attaching"
	// Serving: attached. Rules 2 to 4 hold once the first cell is.
	Serving State = "serving"
)

// Cell is what the rules need of a cell's row.
type Cell struct {
	Name cells.CellID `json:"name" yaml:"name"`
	// Host is the cell's public host; the first cell's is the shared host.
	Host string `json:"host" yaml:"host"`
	// Aliases are further names of Host.
	Aliases []string `json:"aliases,omitempty" yaml:"aliases,omitempty"`
	// Upstream is where the router reaches the cell: http(s)://host[:port], inside the
	// deployment's network. "" is not known.
	Upstream string `json:"upstream,omitempty" yaml:"upstream,omitempty"`
	// Issuers are the bearer-token issuers that the cell accepts, of its current and of
	// its next configuration, compared byte by byte.
	Issuers []string `json:"issuers,omitempty" yaml:"issuers,omitempty"`
	// First: the deployment that the router was put in front of.
	First bool `json:"first,omitempty" yaml:"first,omitempty"`
	// State is Attaching or Serving.
	State State `json:"state" yaml:"state"`
}

// Table is what the directory says.
type Table struct {
	// Aliases are further names of the shared host.
	Aliases []string `json:"aliases,omitempty" yaml:"aliases,omitempty"`
	Cells   []Cell   `json:"cells" yaml:"cells"`
	// Revision grows with every change; 0 is not known.
	Revision int64 `json:"revision,omitempty" yaml:"revision,omitempty"`
}

// Clone returns a copy that shares nothing.
func (t Table) Clone() Table {
	out := Table{Aliases: slices.Clone(t.Aliases), Cells: slices.Clone(t.Cells), Revision: t.Revision}
	for i := range out.Cells {
		out.Cells[i].Aliases = slices.Clone(out.Cells[i].Aliases)
		out.Cells[i].Issuers = slices.Clone(out.Cells[i].Issuers)
	}
	return out
}

// Config is what the router itself is told.
type Config struct {
	// Shared is the deployment's public host, kept by the first cell. Required.
	Shared string
	// Upstream is the deployment that the router was put in front of,
	// http(s)://host[:port]; used until the first cell is registered. Required.
	Upstream string
	// Paths are those of the service's protocols; zero fields take their defaults.
	Paths Paths
}

// Paths are where the service behind the router serves the protocols that have a rule
// of their own. Each holds for itself and what is below it.
type Paths struct {
	// SCIM; default /scim/v2. Groups is the resource that is written for a tenant:
	// default Groups, below SCIM.
	SCIM   string
	Groups string
	// Discovery documents; default /.well-known.
	Discovery string
	// Revoke is the endpoint of RFC 7009; default /oauth/revoke.
	Revoke string
}

// WithDefaults returns the configuration in its normal form; the error wraps
// [cells.ErrInvalid].
func (c Config) WithDefaults() (Config, error) {
	var err error
	if c.Shared, err = hostname.Normalize(c.Shared); err != nil {
		return c, fmt.Errorf("%w: the shared host: %w", cells.ErrInvalid, err)
	}
	if c.Upstream, err = NormalUpstream(c.Upstream); err != nil {
		return c, fmt.Errorf("%w: the address of the deployment behind the router: %w", cells.ErrInvalid, err)
	}
	if upstreamHost(c.Upstream) == c.Shared {
		return c, fmt.Errorf("%w: the address of the deployment behind the router, %s, is the shared host, which is the router itself", cells.ErrInvalid, c.Upstream)
	}
	for _, p := range []struct {
		path *string
		def  string
	}{{&c.Paths.SCIM, "/scim/v2"}, {&c.Paths.Groups, "Groups"}, {&c.Paths.Discovery, "/.well-known"}, {&c.Paths.Revoke, "/oauth/revoke"}} {
		if *p.path == "" {
			*p.path = p.def
		}
		*p.path = strings.TrimSuffix(*p.path, "/")
		if strings.HasPrefix(p.def, "/") != strings.HasPrefix(*p.path, "/") || strings.ContainsAny(*p.path, "%?#;\\ ") || strings.Contains(*p.path, "//") || *p.path == "" {
			return c, fmt.Errorf("%w: path %q: want plain segments, as in %s", cells.ErrInvalid, *p.path, p.def)
		}
	}
	return c, nil
}

// NormalUpstream checks the address of a cell and returns it without a final slash.
func NormalUpstream(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return "", fmt.Errorf("%q is not http(s)://host[:port]", redacted(raw))
	}
	return u.Scheme + "://" + u.Host, nil
}

// redacted leaves out what could be a password.
func redacted(raw string) string {
	if i := strings.LastIndexByte(raw, '@'); i >= 0 {
		return "..." + raw[i:]
	}
	return raw
}

func upstreamHost(upstream string) string {
	_, host, _ := strings.Cut(upstream, "://")
	n, err := hostname.Normalize(host)
	if err != nil {
		return ""
	}
	return n
}

// Index is a table made ready for decisions. It never changes and is safe for
// concurrent use.
type Index struct {
	cfg      Config
	cells    []Cell
	shared   map[string]bool // normal hosts
	hosts    map[string]int  // normal host -> index of cells; nobody: two have it
	issuers  map[string]int
	first    int // nobody: there is none
	firsts   int
	problems []string
}

const nobody = -1

// NewIndex makes a table ready. The error is about the configuration only; what is
// wrong with the table is in [Index.Problems] and affects the rows concerned.
func NewIndex(cfg Config, t Table) (*Index, error) {
	cfg, err := cfg.WithDefaults()
	if err != nil {
		return nil, err
	}
	x := &Index{cfg: cfg, cells: t.Clone().Cells, shared: map[string]bool{cfg.Shared: true}, hosts: map[string]int{}, issuers: map[string]int{}, first: nobody}
	for _, a := range t.Aliases {
		if h, ok := x.host("an alias of the shared host", a); ok {
			x.shared[h] = true
		}
	}
	names := map[cells.CellID]bool{}
	for i := range x.cells {
		c := &x.cells[i]
		if err := c.Name.Validate(); err != nil || names[c.Name] {
			x.problem("a cell's name %.64q is malformed or there twice; the row is left out", c.Name)
			c.Name = ""
			continue
		}
		names[c.Name] = true
		if c.State != Attaching && c.State != Serving {
			x.problem("cell %s has the state %.32q, which is unknown", c.Name, c.State)
		}
		if c.First {
			x.firsts++
			x.first = i
		}
	}
	if x.firsts > 1 {
		x.problem("%d cells are first; the shared host is served by none", x.firsts)
		x.first = nobody
	}
	// The shared host's names come first: no row can take one away.
	for i := range x.cells {
		if c := &x.cells[i]; c.First && c.Name != "" {
			x.names(c, func(h string) { x.shared[h] = true })
			if h, err := hostname.Normalize(c.Host); err == nil && h != cfg.Shared {
				x.problem("cell %s is first and its host is %s, not the shared host %s", c.Name, h, cfg.Shared)
			}
		}
	}
	for i := range x.cells {
		c := &x.cells[i]
		if c.Name == "" {
			continue
		}
		if !c.First {
			x.names(c, func(h string) { x.take(c, i, h) })
		}
		for _, iss := range c.Issuers {
			switch j, ok := x.issuers[iss]; {
			case iss == "":
				x.problem("cell %s lists an empty issuer", c.Name)
			case !ok:
				x.issuers[iss] = i
			case j != i:
				x.problem("issuer %.128q is listed by two cells, one of them %s; it is routed to neither", iss, c.Name)
				x.issuers[iss] = nobody
			}
		}
	}
	for i := range x.cells {
		x.upstream(&x.cells[i])
	}
	slices.Sort(x.problems)
	return x, nil
}

func (x *Index) problem(format string, args ...any) {
	x.problems = append(x.problems, fmt.Sprintf(format, args...))
}

func (x *Index) host(what, h string) (string, bool) {
	n, err := hostname.Normalize(h)
	if err != nil {
		x.problem("%s is left out: %v", what, err)
	}
	return n, err == nil
}

// names calls f with the cell's hosts.
func (x *Index) names(c *Cell, f func(string)) {
	for _, h := range append([]string{c.Host}, c.Aliases...) {
		if n, ok := x.host("a host of cell "+string(c.Name), h); ok {
			f(n)
		}
	}
}

func (x *Index) take(c *Cell, i int, h string) {
	switch j, ok := x.hosts[h]; {
	case x.shared[h]:
		x.problem("cell %s has the host %s, which is the shared host; it stays the shared host", c.Name, h)
	case !ok:
		x.hosts[h] = i
	case j != i:
		x.problem("host %s is that of two cells, one of them %s; it is routed to neither", h, c.Name)
		x.hosts[h] = nobody
	}
}

// upstream makes the cell's address normal, or empty.
func (x *Index) upstream(c *Cell) {
	if c.Name == "" || c.Upstream == "" {
		return
	}
	u, err := NormalUpstream(c.Upstream)
	if err != nil {
		x.problem("the upstream address of cell %s is left out: %v", c.Name, err)
		u = ""
	} else if h := upstreamHost(u); h != "" && x.public(h) {
		x.problem("the upstream address of cell %s is left out: %s is a public host, which is the router itself", c.Name, u)
		u = ""
	}
	c.Upstream = u
}

func (x *Index) public(h string) bool {
	_, ok := x.hosts[h]
	return ok || x.shared[h]
}

// Problems says what is wrong with the table, for people. The caller must not change
// it.
func (x *Index) Problems() []string { return x.problems }

// Upstream returns the address of a cell, "" when it has none that can be used. The
// name "" is the deployment behind the router, as long as there is no first cell.
func (x *Index) Upstream(name cells.CellID) string {
	if name == "" {
		return x.cfg.Upstream
	}
	for i := range x.cells {
		if x.cells[i].Name == name {
			return x.cells[i].Upstream
		}
	}
	return ""
}

// Knows reports whether the table has the cell. The name "" is always known.
func (x *Index) Knows(name cells.CellID) bool {
	return name == "" || slices.ContainsFunc(x.cells, func(c Cell) bool { return c.Name == name })
}

// Cells returns the number of cells.
func (x *Index) Cells() int { return len(x.cells) }
