// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/cloister-dev/cloister/directory/api"
)

func TestByteSize(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "1000": 1000, "7B": 7, "8GiB": 8 << 30, "500MiB": 500 << 20, "2kB": 2000, "3TB": 3e12, "unlimited": -1} {
		var b byteSize
		if err := b.Set(s); err != nil || int64(b) != want {
			t.Errorf("%s: %d, %v", s, b, err)
		}
		var again byteSize
		if err := again.Set(b.String()); err != nil || again != b {
			t.Errorf("%s: written %s, read %d, %v", s, b.String(), again, err)
		}
	}
	for _, s := range []string{"", "-1", "GiB", "8 GiB", "1.5GiB", "8gib", "99999999TiB", "x"} {
		b := byteSize(5)
		if err := b.Set(s); err == nil || b != 5 {
			t.Errorf("%q: %d, %v", s, b, err)
		}
	}
}

func TestThrottleFlags(t *testing.T) {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	var th throttle
	throttleFlags(f, &th)
	if th.get() != nil {
		t.Errorf("without flags: %+v", th.get())
	}
	if err := f.Parse([]string{"--rows-per-second=7", "--max-retained=1GiB", "--max-replica-lag=3s"}); err != nil {
		t.Fatal(err)
	}
	if got, want := *th.get(), (api.Throttle{RowsPerSecond: 7, MaxRetained: 1 << 30, MaxReplicaLag: 3 * time.Second}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
