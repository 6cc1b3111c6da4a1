// SPDX-License-Identifier: Apache-2.0

package process_test

import "log/slog"

var discard = slog.New(slog.DiscardHandler)
