// SPDX-License-Identifier: Apache-2.0

package serverstest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"

	"github.com/cloister-dev/cloister/internal/freeport"
)

const (
	childEnv = "CELL_TEST_S3_SERVER"
	// AccessKey and SecretKey are those of the S3 servers.
	AccessKey = "test-access"
	SecretKey = "test-secret-key"
	// User and Password are those of the ClickHouse servers.
	User     = "cell"
	Password = `pass'word\ with "quotes"`
	patience = 60 * time.Second
)

// Main runs a package's tests, or is an S3 server when [StartS3] started the
// process: func TestMain(m *testing.M) { os.Exit(serverstest.Main(m)) }.
func Main(m interface{ Run() int }) int {
	dir := os.Getenv(childEnv)
	if dir == "" {
		return m.Run()
	}
	if err := serveS3(dir, os.Getenv(childEnv+"_ADDR")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func serveS3(dir, addr string) error {
	side, err := meta.NewSideCar(filepath.Join(dir, "meta")) // whether the file system has extended attributes or not
	if err != nil {
		return err
	}
	be, err := posix.New(filepath.Join(dir, "data"), side, posix.PosixOpts{SideCarDir: filepath.Join(dir, "meta")})
	if err != nil {
		return err
	}
	return embedgw.RunVersityGW(context.Background(), be, &embedgw.Config{RootUserAccess: AccessKey, RootUserSecret: SecretKey, Ports: []string{addr},
		HealthPath: "/health", KeepAlive: true, Quiet: true, MaxConnections: 1000, MaxRequests: 500, MultipartMaxParts: 10000})
}

// Server is a running server.
type Server struct {
	// URL is http://host:port.
	URL string
	cmd *exec.Cmd
}

// Stop ends the server; the test's end does too.
func (s *Server) Stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// StartS3 starts an S3 server whose buckets are folders of dir/data.
func StartS3(tb testing.TB, dir string) *Server {
	tb.Helper()
	for _, d := range []string{"data", "meta"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	addr := address(tb)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+dir, childEnv+"_ADDR="+addr)
	return start(tb, cmd, "http://"+addr, "/health", dir)
}

// ClickHouse is where Debian's package puts the server.
const ClickHouse = "/usr/sbin/clickhouse-server"

// StartClickHouse starts a server with an empty folder; the test is skipped where
// there is none (scripts/need-clickhouse installs it).
func StartClickHouse(tb testing.TB) *Server {
	tb.Helper()
	if _, err := os.Stat(ClickHouse); err != nil {
		tb.Skipf("no ClickHouse here; scripts/need-clickhouse installs it: %v", err)
	}
	dir := tb.TempDir()
	addr := address(tb)
	host, port := addr[:len("127.0.0.1")], addr[len("127.0.0.1:"):]
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	write("config.xml", fmt.Sprintf(`<yandex><logger><level>error</level><console>1</console></logger><http_port>%s</http_port><tcp_port>0</tcp_port><listen_host>%s</listen_host>
		<path>%[3]s/data/</path><tmp_path>%[3]s/tmp/</tmp_path><user_files_path>%[3]s/files/</user_files_path><users_config>users.xml</users_config>
		<default_profile>default</default_profile><default_database>default</default_database><mark_cache_size>1048576</mark_cache_size></yandex>`, port, host, dir))
	write("users.xml", fmt.Sprintf(`<yandex><profiles><default></default><reading><readonly>1</readonly></reading></profiles><quotas><default></default></quotas>
		<users><default><password>%[1]s</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile><quota>default</quota></default>
		<%[2]s><password>%[1]s</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile><quota>default</quota></%[2]s>
		<reader><password>%[1]s</password><networks><ip>127.0.0.1</ip></networks><profile>reading</profile><quota>default</quota></reader></users></yandex>`,
		Password, User))
	cmd := exec.Command(ClickHouse, "--config-file="+filepath.Join(dir, "config.xml"))
	cmd.Dir = dir
	return start(tb, cmd, "http://"+addr, "/ping", dir)
}

func address(tb testing.TB) string {
	tb.Helper()
	addr, err := freeport.Addr()
	if err != nil {
		tb.Fatal(err)
	}
	return addr
}

// start runs a server until the test ends and waits until it answers.
func start(tb testing.TB, cmd *exec.Cmd, url, health, dir string) *Server {
	tb.Helper()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		tb.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	s := &Server{URL: url, cmd: cmd}
	tb.Cleanup(s.Stop)
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+health, nil)
		if err != nil {
			tb.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return s
			}
		}
		select {
		case <-ctx.Done():
			text, _ := os.ReadFile(log.Name())
			tb.Fatalf("the server does not answer: %v\n%s", err, text)
		case <-tick.C:
		}
	}
}
