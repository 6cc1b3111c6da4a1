// SPDX-License-Identifier: Apache-2.0

package deploy_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

func config(change func(*tenancy.Config)) *tenancy.Fingerprint {
	c := tenancy.Config{PublicBaseURL: "https://b.example.com", DeploymentID: "dep-b", Bucket: "store", Prefix: "b", BearerIssuers: []string{"iss-b"},
		OIDCIssuer: "https://idp", OIDCClientID: "b", Tenants: []cells.TenantID{"b-conf"},
		EndUserIssuers: []tenancy.EndUserIssuer{{Issuer: "users-b", Tenants: []string{"b-user-*"}}}}
	if change != nil {
		change(&c)
	}
	f, err := c.Fingerprint()
	if err != nil {
		panic(err)
	}
	return &f
}

// Each thing that two cells may not share is refused, in either value of either cell.
func TestOverlap(t *testing.T) {
	a := tenancy.Config{PublicBaseURL: "https://a.example.com", DeploymentID: "dep-a", Bucket: "store", Prefix: "a", BearerIssuers: []string{"iss-a"},
		OIDCIssuer: "https://idp", OIDCClientID: "a", Tenants: []cells.TenantID{"a-conf"},
		EndUserIssuers: []tenancy.EndUserIssuer{{Issuer: "users-a", Tenants: []string{"a-user-*", "single"}}}}
	fa, err := a.Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	other := deploy.Cell{Name: "a", Host: "a.example.com", Aliases: []string{"www.example.com"}, Stores: deploy.Stores{DeploymentID: "dep-a", Bucket: "store", Prefix: "a"},
		CredentialHash: strings.Repeat("a", 64), NextHash: strings.Repeat("c", 64), KeysFP: "keys-a", Current: &fa}
	cell := func() deploy.Cell {
		return deploy.Cell{Name: "b", Host: "b.example.com", Stores: deploy.Stores{DeploymentID: "dep-b", Bucket: "store", Prefix: "b"},
			CredentialHash: strings.Repeat("b", 64), KeysFP: "keys-b", Current: config(nil)}
	}
	c := cell()
	if err := deploy.Overlap(&c, &other); err != nil {
		t.Fatalf("two cells apart: %v", err)
	}
	for what, change := range map[string]func(*deploy.Cell){
		"host":          func(c *deploy.Cell) { c.Host = "a.example.com" },
		"alias":         func(c *deploy.Cell) { c.Host = "www.example.com" },
		"deployment id": func(c *deploy.Cell) { c.DeploymentID = "dep-a" },
		"same prefix":   func(c *deploy.Cell) { c.Prefix = "a" },
		"prefix inside": func(c *deploy.Cell) { c.Prefix = "a/b" },
		"prefix above":  func(c *deploy.Cell) { c.Prefix = "" },
		"credential":    func(c *deploy.Cell) { c.CredentialHash = other.CredentialHash },
		"its next one":  func(c *deploy.Cell) { c.NextHash = other.NextHash },
		"root secret":   func(c *deploy.Cell) { c.KeysFP = "keys-a" },
		"issuer":        func(c *deploy.Cell) { c.Next = config(func(f *tenancy.Config) { f.BearerIssuers = []string{"iss-a"} }) },
		"users' issuer": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.EndUserIssuers[0].Issuer = "iss-a" })
		},
		"OIDC client": func(c *deploy.Cell) { c.Next = config(func(f *tenancy.Config) { f.OIDCClientID = "a" }) },
		"configured": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.Tenants = []cells.TenantID{"a-conf"} })
		},
		"its pattern": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.Tenants = []cells.TenantID{"a-user-1"} })
		},
		"single pattern": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.Tenants = []cells.TenantID{"single"} })
		},
		"pattern of its": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.EndUserIssuers[0].Tenants = []string{"a-c*"} })
		},
		"wider pattern": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.EndUserIssuers[0].Tenants = []string{"a-*"} })
		},
		"narrow pattern": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.EndUserIssuers[0].Tenants = []string{"a-user-x*"} })
		},
		"configured host": func(c *deploy.Cell) {
			c.Next = config(func(f *tenancy.Config) { f.PublicBaseURL = "https://www.example.com" })
		},
	} {
		c := cell()
		change(&c)
		for _, pair := range [][2]*deploy.Cell{{&c, &other}, {&other, &c}} {
			if err := deploy.Overlap(pair[0], pair[1]); !errors.Is(err, cells.ErrConflict) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if strings.Contains(what, "credential") && strings.Contains(deploy.Overlap(&c, &other).Error(), other.CredentialHash) {
			t.Errorf("%s: the refusal holds a hash", what)
		}
	}
	for what, change := range map[string]func(*deploy.Cell){
		"a name that begins as another": func(c *deploy.Cell) { c.Prefix = "ab" },
		"another bucket":                func(c *deploy.Cell) { c.Bucket, c.Prefix = "other", "a" },
		"no bucket":                     func(c *deploy.Cell) { c.Bucket, c.Prefix = "", "" },
	} {
		c := cell()
		change(&c)
		if err := deploy.Overlap(&c, &other); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestAddresses(t *testing.T) {
	for in, want := range map[string]string{
		"http://H.example.com:80/": "http://h.example.com", "https://h:443": "https://h", "http://h:443": "http://h:443", "https://[2001:DB8::1]:9": "https://[2001:db8::1]:9",
	} {
		if got, err := deploy.NormalProbeURL(in); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "h", "ftp://h", "http://user:secret@h", "http://h/path", "http://h?q", "http://h#f", "http://", "http:h", "http://[fe80::1%25eth0]", "http://h:99999"} {
		if got, err := deploy.NormalUpstream(in); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

// Attach and the changes of configuration keep to their order.
func TestAttachOrder(t *testing.T) {
	v := deploy.View{Kind: deploy.Pinned}
	apply := func(name cells.CellID, rule deploy.Rule) error {
		ch, err := deploy.Apply(&v, name, time.Now(), rule)
		if err != nil {
			return err
		}
		if c := v.Cell(name); c != nil {
			*c = ch.Cell
		} else {
			v.Cells = append(v.Cells, ch.Cell)
		}
		return nil
	}
	must := func(name cells.CellID, rules ...deploy.Rule) {
		t.Helper()
		for _, r := range rules {
			if err := apply(name, r); err != nil {
				t.Fatal(err)
			}
		}
	}
	refused := func(what string, name cells.CellID, rule deploy.Rule, want error) {
		t.Helper()
		if err := apply(name, rule); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	first, err := tenancy.Config{PublicBaseURL: "https://www.example.com", DeploymentID: "dep-a"}.Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	hash := func(c string) string { return strings.Repeat(c, 64) }
	register := func(name, h string) deploy.Rule {
		return deploy.Register(deploy.Registration{Host: name + ".example.com", ProbeURL: "http://10.0.0.2", Stores: deploy.Stores{DeploymentID: "dep-" + name, Bucket: "store", Prefix: name}, CredentialHash: hash(h)})
	}
	later := deploy.Attachment{Current: *config(nil), KeysFP: "k", Upstream: "http://10.0.0.2:80"}
	must("a", deploy.Register(deploy.Registration{First: true, Host: "app.example.com", Aliases: []string{"WWW.example.com"}, Upstream: "http://10.0.0.1", ProbeURL: "http://10.0.0.1:9",
		Stores: deploy.Stores{DeploymentID: "dep-a"}, CredentialHash: hash("a")}))
	must("b", register("b", "b"))
	must("c", register("c", "c"))
	refused("a later cell before the first serves", "b", deploy.Attach(later), cells.ErrConflict)
	refused("serving without attach", "a", deploy.Serve(), cells.ErrConflict)
	refused("a mode before attach", "a", deploy.RaiseMode(tenancy.Enforced), cells.ErrConflict)
	refused("a configuration before attach", "a", deploy.NextConfig(first), cells.ErrConflict)
	must("a", deploy.Attach(deploy.Attachment{Current: first}))
	refused("serving while recording", "a", deploy.Serve(), cells.ErrConflict)
	must("a", deploy.RaiseMode(tenancy.Enforced), deploy.Serve())
	if c := v.Cell("a"); len(c.Modes) != 2 {
		t.Errorf("modes %v", c.Modes)
	}
	wrongHost, wrongStores := later, later
	wrongHost.Current = *config(func(c *tenancy.Config) { c.Issuer = "https://other.example.com" })
	wrongStores.Current = *config(func(c *tenancy.Config) { c.Prefix = "b2" })
	refused("an issuer's host that is not the cell's", "b", deploy.Attach(wrongHost), cells.ErrConflict)
	refused("other stores", "b", deploy.Attach(wrongStores), cells.ErrConflict)
	must("b", deploy.Attach(later))
	refused("a second attach while one runs", "c", deploy.Attach(deploy.Attachment{Upstream: "http://10.0.0.3"}), cells.ErrConflict)
	more := *config(func(c *tenancy.Config) { c.Tenants = append(c.Tenants, "b-more") })
	refused("configured tenants of a later cell that is attaching", "b", deploy.NextConfig(more), cells.ErrConflict)
	must("b", deploy.Serve(), deploy.NextConfig(more), deploy.NextConfig(more))
	refused("another next", "b", deploy.NextConfig(*config(nil)), cells.ErrConflict)
	refused("finishing another value", "b", deploy.EndConfig(*config(nil), true), cells.ErrConflict)
	must("b", deploy.EndConfig(more, true), deploy.EndConfig(more, true))
	refused("other stores in a change", "b", deploy.NextConfig(*config(func(c *tenancy.Config) { c.Bucket = "x" })), cells.ErrConflict)
	refused("attach of a cell that serves", "b", deploy.Attach(later), cells.ErrConflict)
	must("b", deploy.NextConfig(later.Current), deploy.EndConfig(later.Current, false), deploy.EndConfig(later.Current, false))
	if c := v.Cell("b"); !c.Current.Equal(more) || c.Next != nil {
		t.Errorf("after the changes: %+v", c)
	}
}
