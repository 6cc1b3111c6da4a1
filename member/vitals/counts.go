// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Buckets is how many buckets a [Histogram] has: those of [Bounds], and one for all
// that took longer.
const Buckets = len(bounds) + 1

// bounds are the buckets' upper ends in milliseconds. They are part of the wire and of
// what is stored: other bounds would need another type.
var bounds = [...]int64{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536}

// Bounds returns the inclusive upper end of each bucket but the last.
func Bounds() []time.Duration {
	out := make([]time.Duration, len(bounds))
	for i, b := range bounds {
		out[i] = time.Duration(b) * time.Millisecond
	}
	return out
}

// bucket is the one that a latency falls in.
func bucket(d time.Duration) int {
	for i, b := range bounds {
		if d <= time.Duration(b)*time.Millisecond {
			return i
		}
	}
	return len(bounds)
}

// Histogram counts latencies by [Bounds]. The zero value is empty. As JSON it is a
// list without the zeros at its end.
type Histogram [Buckets]int64

// Add counts one latency.
func (h *Histogram) Add(d time.Duration) { h[bucket(d)]++ }

// Total is how many were counted.
func (h *Histogram) Total() int64 {
	var n int64
	for _, x := range h {
		n += x
	}
	return n
}

// Quantile estimates below which latency the share q (0 to 1) of all lies, evenly
// within a bucket; 0 when nothing was counted. What lies beyond the last bound counts
// as the double of it.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.Total()
	if total == 0 {
		return 0
	}
	rank := min(max(q, 0), 1) * float64(total)
	var below float64
	lower := time.Duration(0)
	for i, n := range h {
		upper := 2 * time.Duration(bounds[len(bounds)-1]) * time.Millisecond
		if i < len(bounds) {
			upper = time.Duration(bounds[i]) * time.Millisecond
		}
		if n > 0 && below+float64(n) >= rank {
			return lower + time.Duration(math.Round(float64(upper-lower)*max(rank-below, 0)/float64(n)))
		}
		below += float64(n)
		lower = upper
	}
	return lower
}

// Above counts those that certainly took longer than d: those of d's own bucket are
// not counted.
func (h *Histogram) Above(d time.Duration) int64 {
	var n int64
	for _, x := range h[min(bucket(d)+1, Buckets):] {
		n += x
	}
	return n
}

// MarshalJSON implements [json.Marshaler].
func (h Histogram) MarshalJSON() ([]byte, error) {
	n := len(h)
	for n > 0 && h[n-1] == 0 {
		n--
	}
	return json.Marshal(h[:n])
}

// UnmarshalJSON implements [json.Unmarshaler]. The error wraps [cells.ErrInvalid].
func (h *Histogram) UnmarshalJSON(b []byte) error {
	var list []int64
	if err := json.Unmarshal(b, &list); err != nil {
		return fmt.Errorf("%w: latencies: %w", cells.ErrInvalid, err)
	}
	if len(list) > len(h) {
		return fmt.Errorf("%w: %d buckets of latencies, at most %d", cells.ErrInvalid, len(list), len(h))
	}
	*h = Histogram{}
	copy(h[:], list)
	return nil
}

// Counts is how requests went. Requests = those answered well + Failed + Refused.
type Counts struct {
	Requests int64 `json:"requests"`
	Failed   int64 `json:"failed,omitempty"`
	Refused  int64 `json:"refused,omitempty"`
	// Latency is that of requests that were answered well and were no streams.
	Latency Histogram `json:"latency"`
}

// Bad is how many did not get what they came for.
func (c *Counts) Bad() int64 { return c.Failed + c.Refused }

// Rate is the share of the bad ones; 0 when there were no requests.
func (c *Counts) Rate() float64 {
	if c.Requests == 0 {
		return 0
	}
	return float64(c.Bad()) / float64(c.Requests)
}

// Plus returns the sum.
func (c Counts) Plus(d Counts) Counts {
	c.Requests += d.Requests
	c.Failed += d.Failed
	c.Refused += d.Refused
	for i := range c.Latency {
		c.Latency[i] += d.Latency[i]
	}
	return c
}

// Minus returns what was added since d. Nothing gets below zero.
func (c Counts) Minus(d Counts) Counts {
	c.Requests = max(c.Requests-d.Requests, 0)
	c.Failed = max(c.Failed-d.Failed, 0)
	c.Refused = max(c.Refused-d.Refused, 0)
	for i := range c.Latency {
		c.Latency[i] = max(c.Latency[i]-d.Latency[i], 0)
	}
	return c
}

// Validate reports whether the counts can be true. The error wraps
// [cells.ErrInvalid].
func (c *Counts) Validate() error {
	const most = int64(1) << 53
	if c.Requests < 0 || c.Requests > most || c.Failed < 0 || c.Refused < 0 || c.Failed > c.Requests || c.Refused > c.Requests-c.Failed {
		return fmt.Errorf("%w: %d requests, %d failed, %d refused", cells.ErrInvalid, c.Requests, c.Failed, c.Refused)
	}
	left := c.Requests - c.Bad()
	for _, n := range c.Latency {
		if n < 0 || n > left {
			return fmt.Errorf("%w: latencies of more than the %d requests that were answered well", cells.ErrInvalid, c.Requests-c.Bad())
		}
		left -= n
	}
	return nil
}

// Row is what one process counted of one cell at one version.
type Row struct {
	Cell    cells.CellID `json:"cell"`
	Version string       `json:"version,omitempty"`
	Counts
}

// MaxRows bounds the rows of one process.
const MaxRows = 4096
