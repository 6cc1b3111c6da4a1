// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
)

// Every way to name one host and mean another: the deployment that gets a request is
// the one that the Host it is given names, or none gets it.
func TestForgedHosts(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	for name, c := range map[string]struct{ head, want string }{
		"the host decides, not what a proxy claims": {"GET / HTTP/1.1\nHost: app.example.com\nX-Forwarded-Host: b.example.com\nForwarded: host=b.example.com\nX-Host: b.example.com\nX-Original-Host: b.example.com\n", "a"},
		"two hosts":                         {"GET / HTTP/1.1\nHost: app.example.com\nHost: b.example.com\n", "400"},
		"two equal hosts":                   {"GET / HTTP/1.1\nHost: b.example.com\nHost: b.example.com\n", "400"},
		"two hosts in one line":             {"GET / HTTP/1.1\nHost: app.example.com, b.example.com\n", "400"},
		"no host":                           {"GET / HTTP/1.1\n", "400"},
		"no host, as long ago":              {"GET / HTTP/1.0\n", "UNKNOWN_HOST"},
		"an empty host":                     {"GET / HTTP/1.1\nHost:\n", "UNKNOWN_HOST"},
		"a folded host":                     {"GET / HTTP/1.1\nHost: app.example.com\n b.example.com\n", "400"},
		"a space before the colon":          {"GET / HTTP/1.1\nHost : b.example.com\nHost: app.example.com\n", "400"},
		"the target decides":                {"GET http://b.example.com/ HTTP/1.1\nHost: app.example.com\n", "b"},
		"the target decides, the other way": {"GET http://app.example.com/ HTTP/1.1\nHost: b.example.com\n", "a"},
		"a target of another scheme":        {"GET https://b.example.com:443/ HTTP/1.1\nHost: app.example.com\n", "b"},
		"a target with a user":              {"GET http://b.example.com@app.example.com/ HTTP/1.1\nHost: b.example.com\n", "BAD_REQUEST"},
		"a target with a user and secret":   {"GET http://b.example.com:80@app.example.com/ HTTP/1.1\nHost: b.example.com\n", "BAD_REQUEST"},
		"a target of the own paths":         {"GET http://b.example.com/cells/v1/x HTTP/1.1\nHost: b.example.com\n", "NOT_SERVED"},
		"a target without a host":           {"GET http:///x HTTP/1.1\nHost: b.example.com\n", "b"},
		"an opaque target":                  {"GET b.example.com:80 HTTP/1.1\nHost: app.example.com\n", "BAD_REQUEST"},
		"a target that names a scheme":      {"GET mailto:b.example.com HTTP/1.1\nHost: app.example.com\n", "BAD_REQUEST"},
		"two slashes":                       {"GET //b.example.com/ HTTP/1.1\nHost: app.example.com\n", "a"},
		"a user in the host":                {"GET / HTTP/1.1\nHost: b.example.com@app.example.com\n", "400"},
		"a path in the host":                {"GET / HTTP/1.1\nHost: b.example.com/x\n", "400"},
		"an encoded dot":                    {"GET / HTTP/1.1\nHost: b%2eexample.com\n", "UNKNOWN_HOST"},
		"an encoded dot in the target":      {"GET http://b%2eexample.com/ HTTP/1.1\nHost: app.example.com\n", "400"},
		"a final dot":                       {"GET / HTTP/1.1\nHost: b.example.com.\n", "b"},
		"two final dots":                    {"GET / HTTP/1.1\nHost: b.example.com..\n", "UNKNOWN_HOST"},
		"capitals":                          {"GET / HTTP/1.1\nHost: B.eXample.COM\n", "b"},
		"a default port":                    {"GET / HTTP/1.1\nHost: b.example.com:443\n", "b"},
		"an empty port":                     {"GET / HTTP/1.1\nHost: b.example.com:\n", "b"},
		"another port":                      {"GET / HTTP/1.1\nHost: b.example.com:8443\n", "UNKNOWN_HOST"},
		"the shared host on another port":   {"GET / HTTP/1.1\nHost: app.example.com:8443\n", "UNKNOWN_HOST"},
		"no port":                           {"GET / HTTP/1.1\nHost: b.example.com:x\n", "UNKNOWN_HOST"},
		"a port too many":                   {"GET / HTTP/1.1\nHost: b.example.com:80:80\n", "UNKNOWN_HOST"},
		"a lookalike":                       {"GET / HTTP/1.1\nHost: xn--app-7cd.example.com\n", "UNKNOWN_HOST"},
		"a lookalike in Cyrillic":           {"GET / HTTP/1.1\nHost: xn--80a.example.com\n", "UNKNOWN_HOST"},
		"needless encoding":                 {"GET / HTTP/1.1\nHost: xn--b-.example.com\n", "UNKNOWN_HOST"},
		"bytes":                             {"GET / HTTP/1.1\nHost: \u0431.example.com\n", "400"},
		"an underscore":                     {"GET / HTTP/1.1\nHost: b_.example.com\n", "UNKNOWN_HOST"},
		"a name below":                      {"GET / HTTP/1.1\nHost: x.b.example.com\n", "UNKNOWN_HOST"},
		"a name above":                      {"GET / HTTP/1.1\nHost: example.com\n", "UNKNOWN_HOST"},
		"a name that goes on":               {"GET / HTTP/1.1\nHost: b.example.com.evil.com\n", "UNKNOWN_HOST"},
		"the address of the deployment":     {"GET / HTTP/1.1\nHost: " + strings.TrimPrefix(f.ups["b"], "http://") + "\n", "UNKNOWN_HOST"},
		"IPv6":                              {"GET / HTTP/1.1\nHost: [2001:db8::7]\n", "BACKEND_UNAVAILABLE"},
		"IPv6, long":                        {"GET / HTTP/1.1\nHost: [2001:0DB8:0:0::7]:443\n", "BACKEND_UNAVAILABLE"},
		"IPv6 with a zone":                  {"GET / HTTP/1.1\nHost: [2001:db8::7%25eth0]\n", "UNKNOWN_HOST"},
		"IPv6 with a raw zone":              {"GET / HTTP/1.1\nHost: [2001:db8::7%eth0]\n", "UNKNOWN_HOST"},
		"IPv6 without brackets":             {"GET / HTTP/1.1\nHost: 2001:db8::7\n", "UNKNOWN_HOST"},
		"IPv6 that is not closed":           {"GET / HTTP/1.1\nHost: [2001:db8::7\n", "UNKNOWN_HOST"},
		"IPv4 as a number":                  {"GET / HTTP/1.1\nHost: 2130706433\n", "UNKNOWN_HOST"},
		"IPv4 in octal":                     {"GET / HTTP/1.1\nHost: 0177.0.0.1\n", "UNKNOWN_HOST"},
		"CONNECT":                           {"CONNECT b.example.com:443 HTTP/1.1\nHost: b.example.com:443\n", "NOT_SERVED"},
		"two lengths":                       {"POST / HTTP/1.1\nHost: b.example.com\nContent-Length: 5\nTransfer-Encoding: chunked\n", "b"},
	} {
		r := f.raw(c.head + "Connection: close\n\n0\n\n")
		if got := where(r); got != c.want {
			b, _ := io.ReadAll(r.Body)
			t.Errorf("%s: %s, want %s (%.200s)", name, got, c.want, b)
			continue
		}
		if c.want != "a" && c.want != "b" {
			continue
		}
		// What the cell is told is what was decided by.
		e := decode(t, r)
		named := map[string]string{"a": "app.example.com", "b": "b.example.com"}[c.want]
		low := strings.ToLower(e.Host)
		if !strings.HasPrefix(low, named) || e.Header.Get("X-Forwarded-Host") != e.Host || len(e.Header["X-Forwarded-Host"]) != 1 {
			t.Errorf("%s: the cell got Host %q, X-Forwarded-Host %q", name, e.Host, e.Header["X-Forwarded-Host"])
		}
	}
}

// A client cannot have the router drop what it says of the client itself.
func TestDroppedHeaders(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	e := decode(t, f.raw("GET / HTTP/1.1\nHost: b.example.com\nConnection: X-Forwarded-For, X-Forwarded-Host, X-Forwarded-Proto, Host, close\nX-Forwarded-For: 6.6.6.6\n\n"))
	if e.Host != bHost || e.Header.Get("X-Forwarded-For") != "127.0.0.1" || e.Header.Get("X-Forwarded-Host") != bHost || e.Header.Get("X-Forwarded-Proto") != "http" {
		t.Errorf("%s %v", e.Host, e.Header)
	}
}

// A client cannot get a connection to a cell on which it says what it likes: by h2c it
// would send requests with whatever host, path and headers.
func TestUpgradesToHTTP(t *testing.T) {
	f := newFront(t, frontOptions{table: serving, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" && r.Header.Get("Connection") == "" && r.Header.Get("Http2-Settings") == "" {
			echo(w, r)
			return
		}
		c, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + r.Header.Get("Upgrade") + "\r\n\r\n")
		_ = rw.Flush()
	})})
	for name, head := range map[string]string{
		"h2c":                 "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\n",
		"h2c, capitals":       "GET / HTTP/1.1\nHost: b.example.com\nCONNECTION: uPGRADE\nUPGRADE: H2C\n",
		"h2c, not named":      "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: h2c\nHTTP2-Settings: AAMAAABk\n",
		"settings alone":      "GET / HTTP/1.1\nHost: b.example.com\nHTTP2-Settings: AAMAAABk\n",
		"a list":              "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: websocket, h2c\n",
		"two lines":           "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: websocket\nUpgrade: h2c\n",
		"TLS":                 "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: TLS/1.2\n",
		"HTTP":                "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: HTTP/1.1\n",
		"another one":         "GET / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: raw\n",
		"a WebSocket by POST": "POST / HTTP/1.1\nHost: b.example.com\nConnection: Upgrade\nUpgrade: websocket\nContent-Length: 0\n",
	} {
		r := f.raw(head + "X-Forwarded-Host: app.example.com\n\n")
		if got := where(r); got != "b" || r.StatusCode != 200 {
			t.Errorf("%s: %s, status %d", name, got, r.StatusCode)
			continue
		}
		if e := decode(t, r); e.Header.Get("X-Forwarded-Host") != bHost {
			t.Errorf("%s: the cell got %v", name, e.Header)
		}
	}
}

// A client cannot have one cell chosen by a header that the cell then does not get,
// and another be asked: what decides is what is decided by, dropped or not.
func TestDroppedCredential(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	e := decode(t, f.raw("GET /v1/x HTTP/1.1\nHost: app.example.com\nConnection: Authorization, close\nAuthorization: Bearer "+issued("iss-b")+"\n\n"))
	if len(e.Header["Authorization"]) != 0 || e.Host != sharedHost || f.ran("a") != 0 || f.ran("b") != 1 {
		t.Errorf("%s %v; a was asked %d times", e.Host, e.Header, f.ran("a"))
	}
	for _, h := range []string{"AUTHORIZATION", "authorization", "aUtHorization"} {
		if got := where(f.raw("GET /v1/x HTTP/1.1\nHost: app.example.com\n" + h + ": Bearer " + issued("iss-b") + "\n\n")); got != "b" {
			t.Errorf("%s: %s", h, got)
		}
	}
	for _, h := range []string{"Authorization ", "Authorization\t"} {
		if got := where(f.raw("GET /v1/x HTTP/1.1\nHost: app.example.com\n" + h + ": Bearer " + issued("iss-b") + "\n\n")); got != "400" {
			t.Errorf("%q: %s", h, got)
		}
	}
}

// Over HTTP/2 the authority decides, whatever else is said.
func TestForgedAuthority(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	for name, c := range map[string]struct {
		fields [][2]string
		want   string
	}{
		"plain":               {[][2]string{{":authority", bHost}}, "b"},
		"authority and host":  {[][2]string{{":authority", sharedHost}, {"host", bHost}}, "a"},
		"host and authority":  {[][2]string{{":authority", bHost}, {"host", sharedHost}}, "b"},
		"a host alone":        {[][2]string{{"host", bHost}}, "b"},
		"a user":              {[][2]string{{":authority", "x@" + bHost}}, ""},
		"a full-width letter": {[][2]string{{":authority", "\uff42.example.com"}}, ""},
		"a zone":              {[][2]string{{":authority", "[2001:db8::7%25eth0]"}}, ""},
		"two authorities":     {[][2]string{{":authority", sharedHost}, {":authority", bHost}}, ""},
		"two paths":           {[][2]string{{":authority", sharedHost}, {":path", "/cells/v1/x"}}, ""},
		"two hosts":           {[][2]string{{"host", sharedHost}, {"host", bHost}}, "a"},
		"a late authority":    {[][2]string{{"x", "y"}, {":authority", bHost}}, ""},
		"a protocol":          {[][2]string{{":authority", bHost}, {":protocol", "websocket"}}, ""},
		"capitals":            {[][2]string{{":authority", sharedHost}, {"Host", bHost}}, ""},
		"an upgrade":          {[][2]string{{":authority", bHost}, {"connection", "upgrade"}, {"upgrade", "h2c"}}, ""},
		"a proxy's claims":    {[][2]string{{":authority", bHost}, {"x-forwarded-host", sharedHost}, {"cell-cell", "a"}, {"x_forwarded_host", sharedHost}}, "b"},
	} {
		got, told := f.h2raw(t, c.fields)
		if c.want == "" {
			if got == "a" || got == "b" {
				t.Errorf("%s went to %s, which was told %s", name, got, told)
			}
			continue
		}
		want := map[string]string{"a": sharedHost, "b": bHost}[c.want]
		if got != c.want || told != want {
			t.Errorf("%s: %s, which was told %s", name, got, told)
		}
	}
}

// h2raw sends a GET with these fields and returns who answered, and the Host that it
// got.
func (f *front) h2raw(t *testing.T, fields [][2]string) (got, told string) {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	fr := http2.NewFramer(c, c)
	if err := fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var block strings.Builder
	enc := hpack.NewEncoder(&block)
	for _, kv := range append([][2]string{{":method", "GET"}, {":scheme", "http"}, {":path", "/"}}, fields...) {
		if err := enc.WriteField(hpack.HeaderField{Name: kv[0], Value: kv[1]}); err != nil {
			t.Fatal(err)
		}
	}
	if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte(block.String()), EndStream: true, EndHeaders: true}); err != nil {
		t.Fatal(err)
	}
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var body []byte
	for {
		frame, err := fr.ReadFrame()
		if err != nil {
			return "broken: " + err.Error(), ""
		}
		switch fm := frame.(type) {
		case *http2.MetaHeadersFrame:
			for _, h := range fm.Fields {
				switch h.Name {
				case "x-deployment":
					got = h.Value
				case "cell-answer":
					got = h.Value
				case ":status":
					if got == "" {
						got = h.Value
					}
				}
			}
		case *http2.DataFrame:
			body = append(body, fm.Data()...)
		case *http2.RSTStreamFrame:
			return "reset", ""
		case *http2.GoAwayFrame:
			return "goaway", ""
		}
		if frame.Header().StreamID == 1 && frame.Header().Flags.Has(http2.FlagDataEndStream) {
			var e echoed
			_ = json.Unmarshal(body, &e)
			return got, e.Host
		}
	}
}

// Whatever a bearer token says: on the shared host it reaches the cell that lists its
// issuer, the first cell if it names none, or nobody.
func TestForgedTokens(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	b := issued("iss-b")
	for name, c := range map[string]struct {
		auth []string
		want string
	}{
		"two headers":               {[]string{"Bearer " + issued("iss-a"), "Bearer " + b}, "BAD_REQUEST"},
		"two equal headers":         {[]string{"Bearer " + b, "Bearer " + b}, "BAD_REQUEST"},
		"a password beside":         {[]string{"Basic eDp5", "Bearer " + b}, "BAD_REQUEST"},
		"two tokens in a line":      {[]string{"Bearer " + issued("iss-a") + ", Bearer " + b}, "BAD_REQUEST"},
		"two tokens and a space":    {[]string{"Bearer " + issued("iss-a") + " " + b}, "BAD_REQUEST"},
		"a tab":                     {[]string{"Bearer\t" + b}, "b"},
		"lower case":                {[]string{"bEARER " + b}, "b"},
		"iss twice":                 {[]string{"Bearer " + token(`{"iss":"iss-a","iss":"iss-b"}`)}, "UNKNOWN_ISSUER"},
		"iss twice, the same":       {[]string{"Bearer " + token(`{"iss":"iss-b","iss":"iss-b"}`)}, "UNKNOWN_ISSUER"},
		"iss twice, one escaped":    {[]string{"Bearer " + token(`{"iss":"iss-a","\u0069ss":"iss-b"}`)}, "UNKNOWN_ISSUER"},
		"iss deeper":                {[]string{"Bearer " + token(`{"x":{"iss":"iss-b"},"iss":"iss-a"}`)}, "a"},
		"iss as a list":             {[]string{"Bearer " + token(`{"iss":["iss-b"]}`)}, "UNKNOWN_ISSUER"},
		"iss as nothing":            {[]string{"Bearer " + token(`{"iss":null}`)}, "UNKNOWN_ISSUER"},
		"no iss":                    {[]string{"Bearer " + token(`{}`)}, "UNKNOWN_ISSUER"},
		"iss of other capitals":     {[]string{"Bearer " + token(`{"ISS":"iss-b"}`)}, "UNKNOWN_ISSUER"},
		"an issuer and a space":     {[]string{"Bearer " + issued("iss-b ")}, "UNKNOWN_ISSUER"},
		"an issuer of two cells":    {[]string{"Bearer " + issued("iss-two")}, "UNKNOWN_ISSUER"},
		"a payload that is none":    {[]string{"Bearer eyJhbGciOiJub25lIn0.!!!.x"}, "UNKNOWN_ISSUER"},
		"an empty payload":          {[]string{"Bearer eyJhbGciOiJub25lIn0.."}, "UNKNOWN_ISSUER"},
		"a payload that goes on":    {[]string{"Bearer " + token(`{"iss":"iss-b"} {"iss":"iss-a"}`)}, "UNKNOWN_ISSUER"},
		"a payload that breaks off": {[]string{"Bearer " + token(`{"iss":"iss-b"`)}, "UNKNOWN_ISSUER"},
		"a padded payload":          {[]string{"Bearer " + strings.Replace(b, ".c2ln", "=.c2ln", 1)}, "UNKNOWN_ISSUER"},
		"an encrypted token":        {[]string{"Bearer " + b + ".x.y"}, "a"},
		"an opaque one":             {[]string{"Bearer a.b.c"}, "a"},
		"no scheme":                 {[]string{b}, "a"},
		"too long":                  {[]string{"Bearer " + token(`{"iss":"iss-b","x":"`+strings.Repeat("x", 20<<10)+`"}`)}, "BAD_REQUEST"},
	} {
		head := "GET /v1/x HTTP/1.1\nHost: app.example.com\n"
		for _, a := range c.auth {
			head += "Authorization: " + a + "\n"
		}
		if got := where(f.raw(head + "\n")); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		// On its own host a cell judges everything itself.
		if got := where(f.raw(strings.Replace(head, "Host: app", "Host: b", 1) + "\n")); got != "b" {
			t.Errorf("%s: at the other cell's own host: %s", name, got)
		}
	}
}

// Paths under /cells/ are answered by the router, on every host and in every spelling;
// the handler gets plain ones only, and no cell ever gets one.
func TestOwnPaths(t *testing.T) {
	own := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.EscapedPath(), "/cells/v1/") || r.URL.Path == "/cells/lookup" {
			fmt.Fprintf(w, "own %s %s", r.URL.EscapedPath(), strings.SplitN(r.RemoteAddr, ":", 2)[0])
			return
		}
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeNotServed})
	})
	f := newFront(t, frontOptions{table: serving, own: own, cfg: edge.Config{TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}})
	for _, h := range []string{sharedHost, bHost, "127.0.0.1", "router.internal:8080"} {
		for _, p := range []string{"/cells/v1/placements", "/cells/lookup?tenant=x", "/cells/v1/cells/a/"} {
			r := f.raw("GET " + p + " HTTP/1.1\nHost: " + h + "\nX-Forwarded-For: 9.9.9.9\n\n")
			b, _ := io.ReadAll(r.Body)
			path, _, _ := strings.Cut(p, "?")
			if r.StatusCode != 200 || string(b) != "own "+path+" 9.9.9.9" {
				t.Errorf("%s%s: %s %s", h, p, r.Status, b)
			}
		}
		for _, p := range []string{"/cells", "/cells/", "/cells/x", "/cells/x/v1/placements", "/%63ells/v1/x", "/cells%2fv1/x", "/cells/v1%2fx", "/cells/%76%31/x", "//cells/v1/x", "/cells//v1/x", "/cells/./v1/x",
			"/x/../cells/v1/x", "/cells/x/../v1/x", "/cells/v1/../x", "/CELLS/v1/x", "/cells;x/v1/x", "/cells/v1;x/y", "/cells/..%2f..%2fv1", "/\\cells\\v1", "/cells\\v1/x", "/%2563ells/v1/x", "/cells./v1/x", "/cells /v1"} {
			method := "GET"
			if strings.Contains(p, " ") {
				p = strings.ReplaceAll(p, " ", "%20")
			}
			for _, target := range []string{p, "http://" + strings.Trim(h, ":") + p} {
				r := f.raw(method + " " + target + " HTTP/1.1\nHost: " + h + "\n\n")
				if r.StatusCode == 400 && strings.Contains(p, "\\") {
					continue
				}
				if got := where(r); got != "NOT_SERVED" || r.StatusCode != 404 {
					t.Errorf("%s%s: %s", h, target, got)
				}
			}
		}
	}
	for p, want := range map[string]string{"/livez": "ok\n", "/readyz": "ok\n"} {
		for _, h := range []string{sharedHost, "127.0.0.1", bHost} {
			r := f.raw("GET " + p + " HTTP/1.1\nHost: " + h + "\n\n")
			if b, _ := io.ReadAll(r.Body); r.StatusCode != 200 || string(b) != want {
				t.Errorf("%s: %s %s", p, r.Status, b)
			}
		}
	}
	if f.ran("a")+f.ran("b") != 0 {
		t.Error("a cell got one")
	}
}

// What a trusted proxy says of the client is passed on as the router's own view; what
// the client said to the proxy is not.
func TestDeploymentBehindProxies(t *testing.T) {
	for name, c := range map[string]struct {
		trust     string
		addr, via string
	}{"trusted": {"127.0.0.0/8", "9.9.9.9", "https"}, "not trusted": {"10.0.0.0/8", "127.0.0.1", "http"}} {
		f := newFront(t, frontOptions{table: serving, cfg: edge.Config{TrustedProxies: []netip.Prefix{netip.MustParsePrefix(c.trust)}}})
		e := decode(t, f.raw("GET / HTTP/1.1\nHost: b.example.com\nX-Forwarded-For: 6.6.6.6, 9.9.9.9\nX-Forwarded-Proto: https\nX-Forwarded-Host: app.example.com\n\n"))
		if got := e.Header; strings.Join(got["X-Forwarded-For"], "|") != c.addr || strings.Join(got["X-Forwarded-Proto"], "|") != c.via || strings.Join(got["X-Forwarded-Host"], "|") != "b.example.com" {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A form that does not come holds nothing up for long, and a request that is no
// revocation is not looked into.
func TestRevocationThatStalls(t *testing.T) {
	f := newFront(t, frontOptions{table: serving, cfg: edge.Config{ReadHeaderTimeout: 100 * time.Millisecond}})
	r := f.raw("POST /oauth/revoke HTTP/1.1\nHost: app.example.com\nContent-Type: application/x-www-form-urlencoded\nContent-Length: 100\n\ntoken=")
	if where(r) != "BAD_REQUEST" {
		t.Error(where(r))
	}
	form := "token=" + issued("iss-b")
	for name, head := range map[string]string{"another type": "Content-Type: application/json\n", "another method": "", "a token of its own": "Content-Type: application/x-www-form-urlencoded\nAuthorization: Bearer " + issued("iss-a") + "\n"} {
		method := "POST"
		if name == "another method" {
			method, head = "PUT", "Content-Type: application/x-www-form-urlencoded\n"
		}
		if got := where(f.raw(fmt.Sprintf("%s /oauth/revoke HTTP/1.1\nHost: app.example.com\n%sContent-Length: %d\n\n%s", method, head, len(form), form))); got != "a" {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := where(f.raw(fmt.Sprintf("POST /oauth/revoke HTTP/1.1\nHost: app.example.com\nContent-Type: application/x-www-form-urlencoded\nContent-Encoding: gzip\nContent-Length: %d\n\n%s", len(form), form))); got != "BAD_REQUEST" {
		t.Error("encoded:", got)
	}
}

func TestExplainDeployment(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	ask := func(query string) (e edge.Explanation, status int) {
		resp, err := f.http.Get(f.admin + edge.PathExplain + "?" + query)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode == 200 {
			if err := json.NewDecoder(resp.Body).Decode(&e); err != nil {
				t.Fatal(err)
			}
		}
		return e, resp.StatusCode
	}
	for query, want := range map[string]string{
		"host=b.example.com&path=/x": "b host  [" + f.ups["b"] + "]",
		"host=app.example.com&path=/v1&header=Authorization:Bearer+" + issued("iss-b"): "b issuer  [" + f.ups["b"] + "]",
		"host=app.example.com&path=/scim/v2/Users":                                     "a scim  [" + f.ups["a"] + "]",
		"host=nobody&path=/":                  " host UNKNOWN_HOST []",
		"host=app.example.com&path=/cells/v1": "  NOT_SERVED []",
		"host=[2001:db8::7]":                  "c host BACKEND_UNAVAILABLE []",
	} {
		e, status := ask(query)
		if got := fmt.Sprintf("%s %s %s %v", e.Cell, e.Rule, e.Answer, e.Upstreams); status != 200 || got != want {
			t.Errorf("%s: %d %s, want %s", query, status, got, want)
		}
	}
	f.must(f.http, "GET", "/", nil, host(bHost))
	// It is counted when its client has the answer already.
	f.wait(func() bool { return f.metric(`cell_edge_rules_total{rule="host"}`) == "1" }, "the request to be counted")
	if n := f.metric("cell_edge_table_problems"); n != "1" {
		t.Errorf("%s problems are counted", n)
	}
	if _, status := ask("tenant=acme"); status != 400 {
		t.Error("a tenant was explained:", status)
	}
	var ready edge.Readiness
	resp, err := f.http.Get(f.admin + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&ready); err != nil || !ready.Ready || ready.Cells == nil || ready.Cells.Cells != 3 || len(ready.Cells.Problems) != 1 {
		t.Errorf("%+v %v", ready, err)
	}
}

func TestDeploymentConfig(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	d := edge.Deployment{Table: f.table}
	for name, cfg := range map[string]edge.Config{"extractors": {Extractors: []extract.Spec{{Fixed: "x"}}}, "a key": {AdmissionKey: masterKey}, "a negative": {ConnectWait: -1}} {
		if _, err := edge.NewDeployment(cfg, d); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	if _, err := edge.NewDeployment(edge.Config{}, edge.Deployment{}); err == nil {
		t.Error("no table was taken")
	}
}
