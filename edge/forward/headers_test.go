// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"
)

func TestCleanRequest(t *testing.T) {
	h := http.Header{}
	drop := []string{"Cell-Tenant", "cell-epoch", "CELL-ADMISSION", "Cell_Tenant", "cell.tenant", "Cell~Tenant", "Cell-", "Cell-New-Thing",
		"X-Forwarded-For", "X_Forwarded_For", "x-forwarded-port", "X-Forwarded-Prefix", "Forwarded", "X-Real-Ip", "x_real_ip", "X-Original-Url",
		"X-Forwarded", "X-Host", "x.host", "X-Http-Host-Override", "X-Original-Forwarded-For", "X-Cluster-Client-Ip"}
	keep := []string{"Cell", "Cells-Tenant", "Cellar", "X-Tenant", "X-Cell-Tenant", "Authorization", "Forwarded-By", "X-Forward", "Content-Type"}
	for _, k := range append(append([]string{}, drop...), keep...) {
		h[k] = []string{"v"}
	}
	CleanRequest(h)
	for _, k := range drop {
		if _, ok := h[k]; ok {
			t.Errorf("%s was kept", k)
		}
	}
	for _, k := range keep {
		if _, ok := h[k]; !ok {
			t.Errorf("%s was dropped", k)
		}
	}
}

func TestReserved(t *testing.T) {
	for _, p := range []string{
		"/cells", "/cells/", "/cells/v1/routes", "//cells/x", "/./cells/", "/x/../cells/", "/../cells/", "/%63ells/", "/%2563ells/", "/%252563ells/x",
		"/cells%2Fv1", "/cells%2fv1/agent", "%2Fcells/", "/%2e/cells/", "/x/%2e%2e/cells/", "/x%2F..%2Fcells/", `/\cells/`, `/cells\v1`, "/%5ccells/", "/x/..\\cells",
		"/CELLS/", "/Cells", "/cells;a=b/v1", "/;x/cells/", "/cells%00/", "/cells%20/v1", "/cells./", "/x/%/../../cells", "/cells?x", "/cells%3Fx", "/%c3%28/../cells/",
	} {
		if !Reserved(p) {
			t.Errorf("%q would be forwarded", p)
		}
	}
	for _, p := range []string{
		"", "/", "*", "/cell", "/cellsx", "/x/cells", "/x/cells/", "/v1/cells/1", "/xcells/", "/%2563ellsx/", "/api/../api/cells", "/cellar/s", "/cells-of-bees/", "/c/ells/", "/a%2Fcells/b",
	} {
		if Reserved(p) {
			t.Errorf("%q is reserved", p)
		}
	}
}

func FuzzReserved(f *testing.F) {
	for _, s := range []string{"/cells/", "/%63ells", "//x/../cells", "/a/b", "/\\cells"} {
		f.Add(s)
	}
	// Whatever a plain server would clean to /cells must be found.
	f.Fuzz(func(t *testing.T, raw string) {
		got := Reserved(raw)
		u, err := url.ParseRequestURI(raw)
		if err != nil || !strings.HasPrefix(raw, "/") {
			return
		}
		clean := path.Clean(u.Path)
		if (clean == "/cells" || strings.HasPrefix(clean, "/cells/")) && !got {
			t.Fatalf("%q cleans to %q and would be forwarded", raw, clean)
		}
	})
}

func TestSetPath(t *testing.T) {
	for _, c := range []struct{ uri, strip, want string }{
		{"/a/b?x=1", "", "/a/b?x=1"},
		{"/a%2Fb%2fc", "", "/a%2Fb%2fc"},
		{"/a%20b/%7Euser", "", "/a%20b/%7Euser"},
		{"/a//b/./c/../d", "", "/a//b/./c/../d"},
		{"//a/b", "", "//a/b"},
		{"/a?", "", "/a?"},
		{"/a?x=1;y=%zz&&", "", "/a?x=1;y=%zz&&"},
		{`/a"b|c`, "", `/a"b|c`},
		{"/\xc3\xa9", "", "/\xc3\xa9"},
		{"*", "", "*"},
		{"/t/acme/v1/a%2Fb?q", "/t/acme", "/v1/a%2Fb?q"},
		{"/t/acme", "/t/acme", "/"},
		{"/t/acme?x", "/t/acme", "/?x"},
		{"/%74/acme//x", "/%74/acme", "//x"},
	} {
		in, err := url.ParseRequestURI(c.uri)
		if err != nil {
			t.Fatalf("%q: %v", c.uri, err)
		}
		out := &url.URL{}
		SetPath(out, in, c.uri, c.strip)
		if got := out.RequestURI(); got != c.want {
			t.Errorf("%q without %q is sent as %q, want %q", c.uri, c.strip, got, c.want)
		}
	}
}
