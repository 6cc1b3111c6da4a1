// SPDX-License-Identifier: Apache-2.0

//go:build race

package schedule_test

// raceDetector: it makes a schedule ten times as long.
const raceDetector = true
