// SPDX-License-Identifier: Apache-2.0

package disk

import "syscall"

// Space returns the bytes that an ordinary user may still write to the file system
// that holds path, and its size. Errors are the system's.
func Space(path string) (free, total int64, err error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return 0, 0, err
	}
	return int64(s.Bavail) * s.Bsize, int64(s.Blocks) * s.Bsize, nil
}
