// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"math/bits"
	"time"
)

// subBits says how fine a histogram is: 1/64 of a value, about 1.6 %.
const subBits = 6

// histogram counts durations in buckets whose width grows with the value, as
// HdrHistogram does. The zero value is empty. It is not for concurrent use.
type histogram struct {
	counts [(64 - subBits + 1) << subBits]uint32
	n      int
}

func bucketOf(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	return shift<<subBits + int(v>>shift)
}

// bucketTop is the largest value of a bucket.
func bucketTop(i int) uint64 {
	if i < 1<<(subBits+1) {
		return uint64(i)
	}
	shift := i>>subBits - 1
	return (uint64(i)-uint64(shift)<<subBits+1)<<shift - 1
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucketOf(uint64(max(d, 0)))]++
	h.n++
}

func (h *histogram) merge(o *histogram) {
	for i, c := range o.counts {
		h.counts[i] += c
	}
	h.n += o.n
}

// quantile returns the value that the share q of what was counted does not exceed,
// up to the bucket's width; 0 if nothing was counted.
func (h *histogram) quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank := max(int(q*float64(h.n)+0.5), 1)
	for i, c := range h.counts {
		if rank -= int(c); rank <= 0 {
			return time.Duration(bucketTop(i))
		}
	}
	return 0
}
