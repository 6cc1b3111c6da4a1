// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// cpuOf returns the CPU time of a process, user and system, all its threads and those
// that have ended, by its clock in the kernel.
func cpuOf(pid int) (time.Duration, error) {
	const cpuClockSched = 2
	clock := uintptr(^pid)<<3 | cpuClockSched // as clock_getcpuclockid makes it
	var ts syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, uintptr(int32(clock)), uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, errno)
	}
	return time.Duration(ts.Nano()), nil
}

// cpuOfAll sums processes.
func cpuOfAll(pids []int) (sum time.Duration, err error) {
	for _, pid := range pids {
		d, err := cpuOf(pid)
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

// withChildren returns a process and its direct children.
func withChildren(pid int) ([]int, error) {
	pids := []int{pid}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// pid (name) state ppid ...; the name may hold anything.
		s := string(b)
		fields := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
		if len(fields) < 2 || fields[1] != strconv.Itoa(pid) {
			continue
		}
		child, err := strconv.Atoi(strings.Fields(s)[0])
		if err != nil {
			return nil, err
		}
		pids = append(pids, child)
	}
	return pids, nil
}

// machine says what the numbers were taken on.
func machine() string {
	model := "unknown CPU"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if name, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(v)
				break
			}
		}
	}
	kernel := "unknown"
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		kernel = strings.TrimSpace(string(b))
	}
	memory := ""
	var si syscall.Sysinfo_t
	if syscall.Sysinfo(&si) == nil {
		memory = fmt.Sprintf(", %d GiB", uint64(si.Totalram)*uint64(si.Unit)>>30)
	}
	return fmt.Sprintf("%d cores (%s)%s, Linux %s, %s, %s", runtime.NumCPU(), model, memory, kernel, runtime.Version(), time.Now().UTC().Format("2006-01-02"))
}
