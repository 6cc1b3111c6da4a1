// SPDX-License-Identifier: Apache-2.0

package open_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/open"
	"github.com/cloister-dev/cloister/member/stores/postgres"
	"github.com/cloister-dev/cloister/member/stores/s3"
)

func TestFromEnv(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	keys := file("keys", "user\nhunter2\n")
	if cfg, err := open.FromEnv(); err != nil || cfg.S3 != nil || cfg.ClickHouse != nil {
		t.Errorf("nothing set: %+v, %v", cfg, err)
	}
	set := func(t *testing.T, env ...string) {
		for i := 0; i < len(env); i += 2 {
			t.Setenv(env[i], env[i+1])
		}
	}
	t.Run("all", func(t *testing.T) {
		set(t, "CELL_S3_URL", "https://s3.example:9000/bucket/env/a%20b/", "CELL_S3_REGION", "eu", "CELL_S3_KEY_FILE", keys,
			"CELL_CLICKHOUSE_URL", "http://ch:8123", "CELL_CLICKHOUSE_DATABASE", "db", "CELL_CLICKHOUSE_KEY_FILE", keys)
		cfg, err := open.FromEnv()
		if err != nil {
			t.Fatal(err)
		}
		if want := (s3.Config{Endpoint: "https://s3.example:9000", Region: "eu", Location: stores.Location{Bucket: "bucket", Prefix: "env/a b"}, AccessKey: "user", SecretKey: "hunter2"}); *cfg.S3 != want {
			t.Errorf("S3: %+v, want %+v", *cfg.S3, want)
		}
		if c := cfg.ClickHouse; c.URL != "http://ch:8123" || c.Database != "db" || c.User != "user" || c.Password != "hunter2" {
			t.Errorf("ClickHouse: %+v", *c)
		}
	})
	const s3URL = "https://s3.example/bucket"
	for name, env := range map[string][]string{
		"keys without a store":        {"CELL_S3_KEY_FILE", keys},
		"a database without a server": {"CELL_CLICKHOUSE_DATABASE", "db"},
		"no bucket":                   {"CELL_S3_URL", "https://s3.example/"},
		"a user":                      {"CELL_S3_URL", "https://me:hunter2@s3.example/bucket"},
		"another scheme":              {"CELL_S3_URL", "s3://bucket/prefix"},
		"a query":                     {"CELL_S3_URL", s3URL + "?x=hunter2"},
		"a prefix of two readings":    {"CELL_S3_URL", s3URL + "/a/../b"},
		"an encoded slash":            {"CELL_S3_URL", s3URL + "/a%2f%2fb"},
		"a bucket that is none":       {"CELL_S3_URL", "https://s3.example/B"},
		"no file":                     {"CELL_S3_URL", s3URL, "CELL_S3_KEY_FILE", filepath.Join(dir, "none")},
		"one line":                    {"CELL_S3_URL", s3URL, "CELL_S3_KEY_FILE", file("one", "hunter2\n")},
		"three lines":                 {"CELL_S3_URL", s3URL, "CELL_S3_KEY_FILE", file("three", "a\nhunter2\nc\n")},
		"no certificate":              {"CELL_CLICKHOUSE_URL", "https://ch", "CELL_CLICKHOUSE_CA_FILE", keys},
	} {
		t.Run(name, func(t *testing.T) {
			set(t, env...)
			if _, err := open.FromEnv(); !errors.Is(err, cells.ErrInvalid) || strings.Contains(fmt.Sprint(err), "hunter2") {
				t.Errorf("%v, want ErrInvalid without the secret", err)
			}
		})
	}
}

func TestOpenFails(t *testing.T) {
	if s, err := open.Open(t.Context(), open.Config{Postgres: postgres.Config{URL: "postgres://me:hunter2@127.0.0.1:1/db"}}); s != nil || !errors.Is(err, cells.ErrUnavailable) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("%v, want ErrUnavailable", err)
	}
}
