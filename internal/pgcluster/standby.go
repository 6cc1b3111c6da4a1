// SPDX-License-Identifier: Apache-2.0

package pgcluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cloister-dev/cloister/internal/freeport"
)

// Standby makes a hot standby that streams from the cluster, in a folder of its own,
// and starts it. It has the cluster's password. The caller stops it.
func (c *Cluster) Standby(ctx context.Context, dir string) (*Cluster, error) {
	s := &Cluster{opts: Options{Dir: dir, Settings: c.opts.Settings, NoSync: c.opts.NoSync}, bin: c.bin, cred: c.cred,
		log: filepath.Join(dir, "server.log"), password: c.password}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if s.cred != nil {
		if err := chownTree(dir, s.cred); err != nil {
			return nil, err
		}
	}
	cmd := s.command(ctx, "pg_basebackup", "-D", filepath.Join(dir, "data"), "-R", "-X", "stream", "-c", "fast", "--no-sync",
		"-h", "127.0.0.1", "-p", strconv.Itoa(c.Port), "-U", "postgres")
	cmd.Env = append(cmd.Env, "PGPASSWORD="+c.password)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("pg_basebackup: %w: %s", err, bytes.TrimSpace(out))
	}
	var err error
	if s.Port, err = freeport.Port(); err != nil {
		return nil, err
	}
	return s, s.Restart(ctx)
}
