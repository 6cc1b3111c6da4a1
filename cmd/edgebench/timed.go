// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// timed does n requests, as many at once as there are workers, each of which does one
// after the other: the i-th the k-th of all. The first error ends it.
func timed(workers, n int, do func(i, k int) error) (*loadResult, error) {
	parts, errs := make([]histogram, workers), make([]error, workers)
	var next atomic.Int64
	var wg sync.WaitGroup
	started := time.Now()
	for i := range workers {
		wg.Go(func() {
			for {
				k := int(next.Add(1)) - 1
				if k >= n {
					return
				}
				sent := time.Now()
				if errs[i] = do(i, k); errs[i] != nil {
					next.Store(int64(n))
					return
				}
				parts[i].add(time.Since(sent))
			}
		})
	}
	wg.Wait()
	res := &loadResult{requests: n, took: time.Since(started)}
	for i := range parts {
		res.latency.merge(&parts[i])
	}
	return res, errors.Join(errs...)
}
