// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/cloister-dev/cloister/directory/provision/process"
)

// processMark begins the environment variable that says which process of a fleet a
// process is: "directory", "edge", "<cell>-<n>" or "<cell>-postgres".
const processMark = process.Mark

// Processes returns the running processes of the fleet that info describes, by
// name. [ErrStopped] when the process that started it is gone.
func (i Info) Processes() (map[string]int, error) {
	if err := syscall.Kill(i.PID, 0); err != nil {
		return nil, ErrStopped
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || parent(d) != i.PID {
			continue
		}
		env, err := os.ReadFile(filepath.Join(d, "environ"))
		if err != nil {
			continue // it has ended, or is somebody else's
		}
		for _, v := range bytes.Split(env, []byte{0}) {
			if name, ok := bytes.CutPrefix(v, []byte(processMark)); ok {
				out[string(name)] = pid
			}
		}
	}
	return out, nil
}

// Kill ends one process of the fleet as a crash does, and returns its id. The error
// for an unknown name says which there are.
func (i Info) Kill(name string) (int, error) {
	procs, err := i.Processes()
	if err != nil {
		return 0, err
	}
	pid, ok := procs[name]
	if !ok {
		return 0, fmt.Errorf("%w: no process %q runs; there are %s", ErrNoProcess, name, strings.Join(slices.Sorted(maps.Keys(procs)), ", "))
	}
	return pid, syscall.Kill(pid, syscall.SIGKILL)
}

// ErrNoProcess says that a fleet has no process of that name.
var ErrNoProcess = errors.New("no such process")

// parent returns a process's parent, or 0.
func parent(proc string) int {
	b, err := os.ReadFile(filepath.Join(proc, "stat"))
	if err != nil {
		return 0
	}
	// The name may have spaces and brackets in it; it ends with the last bracket.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 2 {
		return 0
	}
	ppid, _ := strconv.Atoi(fields[1])
	return ppid
}
