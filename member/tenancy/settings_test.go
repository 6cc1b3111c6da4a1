// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

func TestFromEnv(t *testing.T) {
	token := "lcr_" + strings.Repeat("0f", 64)
	good := map[string]string{"CELL": "a", "CELL_PUBLIC_BASE_URL": "https://a.example", "CELL_ROUTER_URL": "https://r.example", "CELL_ROUTER_TOKEN": token,
		"CELL_TENANCY_MODE_CACHE_S": "2.5", "CELL_ROUTER_TIMEOUT_S": "1", "CELL_TENANCY_MAX_STALE_S": "30", "CELL_BEARER_ISSUERS": " x, y ,", "CELL_TENANTS": "t1,t2",
		"CELL_SCIM": "true", "CELL_END_USER_ISSUERS": `[{"issuer":"u","tenants":["u-*"]}]`, "CELL_OIDC_ISSUER": "o", "CELL_OIDC_CLIENT_ID": "c", "CELL_BEARER_AUDIENCES": `{"x":"svc"}`}
	read := func(change map[string]string) (Settings, error) {
		return From(func(name string) (string, bool) {
			if v, ok := change[name]; ok {
				return v, true
			}
			v, ok := good[name]
			return v, ok
		})
	}
	s, err := read(nil)
	if err != nil || s.Cell != "a" || s.CacheFor != 2500*time.Millisecond || s.RouterTimeout != time.Second || s.MaxStale != 30*time.Second || s.RouterToken != token {
		t.Fatalf("%+v, %v", s, err)
	}
	f, err := s.Configuration.Fingerprint()
	if err != nil || !strings.Contains(string(f.Encode()), `"issuers":["u","x","y"]`) || !strings.Contains(string(f.Encode()), `"patterns":["u-*"]`) || !slices.Equal(f.Get("audiences"), []string{`["x","svc"]`}) {
		t.Errorf("%s, %v", f.Encode(), err)
	}
	for name, v := range map[string]string{"CELL": "A_b", "CELL_PUBLIC_BASE_URL": "", "CELL_ROUTER_TOKEN": "lcr_" + strings.Repeat("0F", 64), "CELL_TENANCY_MODE_CACHE_S": "0",
		"CELL_ROUTER_TIMEOUT_S": "NaN", "CELL_SCIM": "perhaps", "CELL_END_USER_ISSUERS": `[{"issuer":"u","more":1}]`, "CELL_TENANTS": "a b", "CELL_BEARER_AUDIENCES": `{"z":"svc"}`} {
		if _, err := read(map[string]string{name: v}); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s=%s: %v", name, v, err)
		}
	}
	for _, secret := range []string{token[4:], "lco_" + token[4:], token + "0", strings.Repeat("g", 132)} {
		_, err := read(map[string]string{"CELL_ROUTER_TOKEN": secret})
		if err == nil || strings.Contains(err.Error(), secret) || !strings.Contains(err.Error(), "cell credential new") {
			t.Errorf("%.8s...: %v", secret, err)
		}
	}
	if s, err := From(func(string) (string, bool) { return "", false }); err != nil || s.Cell != "" {
		t.Errorf("nothing set: %+v, %v", s, err)
	}
}
