// SPDX-License-Identifier: Apache-2.0

package freeport

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

const (
	lowest = 10240
	// tries bounds how many ports are looked at.
	tries = 500
)

var (
	mu    sync.Mutex
	given = map[int]*os.File{} // guarded by mu; the lock of each port, nil without one
)

// Port returns a port of 127.0.0.1 on which nothing listens. It is not given out
// again while this process lives.
func Port() (int, error) {
	mu.Lock()
	defer mu.Unlock()
	low, high := bounds()
	for range tries {
		p := low + rand.IntN(high-low)
		if _, taken := given[p]; taken {
			continue
		}
		lock, err := claim(p)
		if err != nil {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p)))
		if err == nil {
			err = l.Close()
		}
		if err != nil {
			_ = lock.Close()
			continue
		}
		given[p] = lock
		return p, nil
	}
	return 0, errors.New("no free port found on 127.0.0.1")
}

// Addr is [Port] as an address.
func Addr() (string, error) {
	p, err := Port()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(p)), err
}

// bounds is the range that is chosen from: below the kernel's own.
func bounds() (low, high int) {
	low, high = lowest, 32768
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return low, high
	}
	var first, last int
	if n, _ := fmt.Sscan(string(b), &first, &last); n == 2 && first > 1024 {
		switch {
		case first >= lowest+2000:
			high = first
		case last <= 65535-2000:
			low, high = last+1, 65536
		}
	}
	return low, high
}

// claim locks the port's file for the life of this process.
func claim(port int) (*os.File, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("cell-ports-%d", os.Getuid()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
