// SPDX-License-Identifier: Apache-2.0

package rows

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// usage is processor time: of this process, of programs that it ran and has waited for,
// and of the cluster.
type usage struct{ agents, programs, postgres time.Duration }

func (u usage) minus(o usage) usage {
	return usage{u.agents - o.agents, u.programs - o.programs, u.postgres - o.postgres}
}

func (p *pair) usage() (u usage, err error) {
	var self, children syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &self); err != nil {
		return u, err
	}
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &children); err != nil {
		return u, err
	}
	u.agents = time.Duration(self.Utime.Nano() + self.Stime.Nano())
	u.programs = time.Duration(children.Utime.Nano() + children.Stime.Nano())
	u.postgres, err = treeTime(p.cluster.PID())
	return u, err
}

// tick is the unit of times in /proc.
const tick = 10 * time.Millisecond

// treeTime is the processor time of a process, of its children, and of those that have
// ended.
func treeTime(pid int) (time.Duration, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	total, found := int64(0), false
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// The name, in parentheses, may contain anything.
		f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		own := filepath.Base(filepath.Dir(name)) == strconv.Itoa(pid)
		if len(f) < 15 || !own && f[1] != strconv.Itoa(pid) {
			continue
		}
		last := 13 // utime and stime
		if own {
			last, found = 15, true // and those of ended children
		}
		for _, s := range f[11:last] {
			n, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				return 0, err
			}
			total += n
		}
	}
	if !found {
		return 0, fmt.Errorf("process %d is not there", pid)
	}
	return time.Duration(total) * tick, nil
}
