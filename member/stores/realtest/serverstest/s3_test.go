// SPDX-License-Identifier: Apache-2.0

package serverstest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/realtest/serverstest"
	"github.com/cloister-dev/cloister/member/stores/s3"
	"github.com/cloister-dev/cloister/member/stores/storestest"
)

func TestMain(m *testing.M) { os.Exit(serverstest.Main(both{m})) }

// both runs the tests with a Postgres too.
type both struct{ m *testing.M }

func (b both) Run() int { return pgtest.Main(b.m) }

// bucketServer is an S3 server with a client of its own.
type bucketServer struct {
	*serverstest.Server
	dir    string
	client *minio.Client
}

func startS3(t *testing.T) *bucketServer {
	t.Helper()
	// What keeps a connection open after a test is found.
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { http.DefaultClient.CloseIdleConnections(); goleak.VerifyNone(t, before) })
	dir := t.TempDir()
	s := &bucketServer{Server: serverstest.StartS3(t, dir), dir: dir}
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	s.client, err = minio.New(u.Host, &minio.Options{Creds: credentials.NewStaticV4(serverstest.AccessKey, serverstest.SecretKey, ""), Region: "us-east-1", Transport: tr})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var buckets atomic.Int64

func (b *bucketServer) bucket(tb storestest.TB) string {
	name := fmt.Sprintf("cell-%d", buckets.Add(1))
	if err := b.client.MakeBucket(tb.Context(), name, minio.MakeBucketOptions{}); err != nil {
		tb.Fatalf("make bucket: %v", err)
	}
	return name
}

func (b *bucketServer) open(tb storestest.TB, at stores.Location) stores.Store {
	return openAt(tb, b.URL, at)
}

func openAt(tb storestest.TB, endpoint string, at stores.Location) stores.Store {
	s, err := s3.Open(tb.Context(), s3.Config{Endpoint: endpoint, Location: at, AccessKey: serverstest.AccessKey, SecretKey: serverstest.SecretKey})
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	tb.Cleanup(s.Close)
	return s
}

func (b *bucketServer) put(tb storestest.TB, at stores.Location, name, text string) {
	if _, err := b.client.PutObject(tb.Context(), at.Bucket, at.Key(name), strings.NewReader(text), int64(len(text)), minio.PutObjectOptions{}); err != nil {
		tb.Fatalf("put: %v", err)
	}
}

func (b *bucketServer) harness(prefix string) storestest.Harness {
	below := func(outer stores.Store, part string) stores.Location {
		at := outer.Location()
		at.Prefix = strings.TrimPrefix(at.Prefix+part, "/")
		return at
	}
	return storestest.Harness{
		New: func(tb storestest.TB) stores.Store {
			return b.open(tb, stores.Location{Bucket: b.bucket(tb), Prefix: prefix})
		},
		Another: func(tb storestest.TB, s stores.Store) stores.Store { return b.open(tb, s.Location()) },
		Fill: func(tb storestest.TB, s stores.Store, tenant string) {
			b.put(tb, s.Location(), "docs/"+tenant+"/1", "text")
		},
		Garble: func(tb storestest.TB, s stores.Store, text string) { b.put(tb, s.Location(), "_cell_probe", text) },
		Down: func(tb storestest.TB) stores.Store {
			gone := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {}))
			s := openAt(tb, gone.URL, stores.Location{Bucket: "bucket"})
			gone.Close()
			return s
		},
		Inside: func(tb storestest.TB, s stores.Store) stores.Store { return b.open(tb, below(s, "/in/side")) },
		Beside: func(tb storestest.TB, s stores.Store) stores.Store {
			if s.Location().Prefix == "" {
				return b.open(tb, stores.Location{Bucket: b.bucket(tb)})
			}
			return b.open(tb, below(s, "-beside"))
		},
	}
}

func TestS3(t *testing.T) {
	b := startS3(t)
	t.Run("prefix", func(t *testing.T) { storestest.Run(t, b.harness("env/cell a+b%2F")) })
	t.Run("whole bucket", func(t *testing.T) { storestest.Run(t, b.harness("")) })
}

// A server that does not know If-None-Match still gets one id.
func TestS3WithoutConditions(t *testing.T) {
	b := startS3(t)
	refused := 0
	proxy := httptest.NewServer(through(t, b.URL, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPut && r.Header.Get("If-None-Match") != "" {
			refused++
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusNotImplemented)
			fmt.Fprint(w, `<Error><Code>NotImplemented</Code><Message>no conditions here</Message></Error>`)
			return true
		}
		return false
	}))
	t.Cleanup(proxy.Close)
	s := openAt(t, proxy.URL, stores.Location{Bucket: b.bucket(t), Prefix: "p"})
	first := stores.NewDeploymentID()
	for _, id := range []stores.DeploymentID{first, stores.NewDeploymentID()} {
		if got, err := s.Establish(t.Context(), id); err != nil || got != first {
			t.Fatalf("establish: %s, %v; want %s", got, err, first)
		}
	}
	if refused == 0 {
		t.Error("no condition was sent, so this shows nothing")
	}
}

// through is a proxy that keeps the client's Host, which is signed. first may answer
// itself.
func through(t *testing.T, target string, first func(http.ResponseWriter, *http.Request) bool) http.Handler {
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	p := &httputil.ReverseProxy{Transport: tr, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(u); r.Out.Host = r.In.Host }}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !first(w, r) {
			p.ServeHTTP(w, r)
		}
	})
}

// Objects that are not this package's count, those that consoles make for folders
// do not, and a listing of several pages is read to its end.
func TestS3Objects(t *testing.T) {
	b := startS3(t)
	at := stores.Location{Bucket: b.bucket(t), Prefix: "env/a"}
	s := b.open(t, at)
	want := func(what string, empty bool) {
		t.Helper()
		if got, holds, err := s.Empty(t.Context()); err != nil || got != empty {
			t.Errorf("%s: empty %v (%s), %v; want %v", what, got, holds, err, empty)
		}
	}
	b.put(t, stores.Location{Bucket: at.Bucket}, "env/ab/x", "another prefix")
	b.put(t, stores.Location{Bucket: at.Bucket}, "env/x", "above")
	b.put(t, at, "", "")
	want("a folder's marker", true)
	for _, name := range []string{"_cell_probe/x", "_cell_isolation/x", "_cell_other", "_cell_probe2"} {
		b.put(t, at, name, "x")
		want(name, false)
		if err := b.client.RemoveObject(t.Context(), at.Bucket, at.Key(name), minio.RemoveObjectOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	want("removed again", true)

	// The mark of a cell inside comes after more objects than a listing's page has.
	folder := filepath.Join(b.dir, "data", at.Bucket, "env", "a", "m")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 2100 {
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("%05d", i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	inner := b.open(t, stores.Location{Bucket: at.Bucket, Prefix: "env/a/z"})
	m := stores.NewMark()
	if err := inner.Plant(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if seen, err := s.Visible(t.Context(), m); err != nil || !seen {
		t.Errorf("a mark behind 2100 objects: visible %v, %v", seen, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if seen, err := s.Visible(ctx, stores.NewMark()); err == nil || seen {
		t.Errorf("a listing that was cut short: %v, %v; want an error", seen, err)
	}
}

// Credentials and buckets that are wrong are told apart from a server that is away.
func TestS3Refusals(t *testing.T) {
	b := startS3(t)
	at := stores.Location{Bucket: b.bucket(t)}
	const secret = "hunter2-hunter2"
	for name, c := range map[string]struct {
		edit func(*s3.Config)
		want error
	}{
		"key":      {func(c *s3.Config) { c.SecretKey = secret }, cells.ErrInvalid},
		"user":     {func(c *s3.Config) { c.AccessKey = "nobody" }, cells.ErrInvalid},
		"bucket":   {func(c *s3.Config) { c.Location.Bucket = "not-there" }, cells.ErrInvalid},
		"no name":  {func(c *s3.Config) { c.Location.Bucket = "" }, cells.ErrInvalid},
		"prefix":   {func(c *s3.Config) { c.Location.Prefix = "a//b" }, cells.ErrInvalid},
		"scheme":   {func(c *s3.Config) { c.Endpoint = "s3://host" }, cells.ErrInvalid},
		"userinfo": {func(c *s3.Config) { c.Endpoint = "http://me:" + secret + "@127.0.0.1:1" }, cells.ErrInvalid},
		"half":     {func(c *s3.Config) { c.SecretKey = "" }, cells.ErrInvalid},
		"away":     {func(c *s3.Config) { c.Endpoint = "http://127.0.0.1:1" }, cells.ErrUnavailable},
	} {
		cfg := s3.Config{Endpoint: b.URL, Location: at, AccessKey: serverstest.AccessKey, SecretKey: serverstest.SecretKey}
		c.edit(&cfg)
		s, err := s3.Open(t.Context(), cfg)
		if s != nil || !errors.Is(err, c.want) || strings.Contains(fmt.Sprint(err), secret) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// A cache between the process and the bucket that does as HTTP says never answers
// for the bucket.
func TestS3Caches(t *testing.T) {
	b := startS3(t)
	kept := map[string]*httptest.ResponseRecorder{}
	var cache http.Handler
	direct := through(t, b.URL, func(http.ResponseWriter, *http.Request) bool { return false })
	cache = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.Header.Get("Cache-Control") == "no-cache" {
			direct.ServeHTTP(w, r)
			return
		}
		if kept[r.URL.String()] == nil {
			kept[r.URL.String()] = httptest.NewRecorder()
			direct.ServeHTTP(kept[r.URL.String()], r)
		}
		for k, v := range kept[r.URL.String()].Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(kept[r.URL.String()].Code)
		_, _ = w.Write(kept[r.URL.String()].Body.Bytes())
	})
	srv := httptest.NewServer(cache)
	t.Cleanup(srv.Close)
	s := openAt(t, srv.URL, stores.Location{Bucket: b.bucket(t)})
	for range 3 {
		n := stores.NewNonce()
		if err := s.WriteNonce(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if got, err := s.ReadNonce(t.Context()); err != nil || got != n {
			t.Fatalf("%.8s, %v; want %.8s", got, err, n)
		}
	}
}
