package cli

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestReadKubelet(t *testing.T) {
	for name, tc := range map[string]struct {
		args  string // of the kubelet that runs
		files map[string]string
		want  kubeletSettings
	}{
		"file": {
			files: map[string]string{"config.yaml": "imageServiceEndpoint: unix:///a"},
			want:  kubeletSettings{source: "DIR/config.yaml", endpoint: "unix:///a"},
		},
		"file without it": {
			files: map[string]string{"config.yaml": "containerRuntimeEndpoint: unix:///a"},
			want:  kubeletSettings{source: "DIR/config.yaml", runtime: "unix:///a"},
		},
		"flag before file": {
			args:  "/usr/bin/kubelet --v=2 --image-service-endpoint=unix:///b --config DIR/config.yaml",
			files: map[string]string{"config.yaml": "imageServiceEndpoint: unix:///a"},
			want:  kubeletSettings{source: "--image-service-endpoint", endpoint: "unix:///b"},
		},
		"last flag": {
			args: "kubelet --image-service-endpoint unix:///b -image-service-endpoint=unix:///c",
			want: kubeletSettings{source: "--image-service-endpoint", endpoint: "unix:///c"},
		},
		"file of the one that runs": {
			args:  "hyperkube kubelet --config=DIR/other.yaml",
			files: map[string]string{"config.yaml": "imageServiceEndpoint: unix:///a", "other.yaml": "imageServiceEndpoint: unix:///b"},
			want:  kubeletSettings{source: "DIR/other.yaml", endpoint: "unix:///b"},
		},
		"drop-ins": {
			args: "kubelet --config DIR/config.yaml --config-dir DIR/d",
			files: map[string]string{
				"config.yaml": "imageServiceEndpoint: unix:///a", "d/10.conf": "imageServiceEndpoint: unix:///b",
				"d/20.conf": "kind: KubeletConfiguration", "d/30.yaml": "imageServiceEndpoint: unix:///c",
			},
			want: kubeletSettings{source: "DIR/d/10.conf", endpoint: "unix:///b"},
		},
		"of this CRI-O": {
			args:  "kubelet --image-service-endpoint=unix:///b --config=DIR/config.yaml",
			files: map[string]string{"config.yaml": "containerRuntimeEndpoint: unix:///crio.sock"},
			want:  kubeletSettings{source: "--image-service-endpoint", endpoint: "unix:///b", runtime: "unix:///crio.sock"},
		},
		"of another CRI-O": {
			args: "kubelet --image-service-endpoint=unix:///b --container-runtime-endpoint=unix:///other.sock --config=DIR/other.yaml",
			files: map[string]string{
				"config.yaml": "imageServiceEndpoint: unix:///a", "other.yaml": "containerRuntimeEndpoint: unix:///crio.sock",
			},
			want: kubeletSettings{source: "DIR/config.yaml", endpoint: "unix:///a"},
		},
		"another program": {
			args:  "vi --image-service-endpoint=unix:///b kubelet",
			files: map[string]string{"config.yaml": "imageServiceEndpoint: unix:///a"},
			want:  kubeletSettings{source: "DIR/config.yaml", endpoint: "unix:///a"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(name, text string) {
				path := filepath.Join(dir, name)
				require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
				require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
			}
			for name, text := range tc.files {
				write(name, text)
			}
			write("proc/1/cmdline", "/sbin/init\x00")
			write("proc/self/cmdline", "kubelet\x00--image-service-endpoint=unix:///self\x00")
			if tc.args != "" {
				write("proc/12/cmdline", strings.ReplaceAll(strings.ReplaceAll(tc.args, "DIR", dir), " ", "\x00")+"\x00")
			}
			got, err := readKubelet(filepath.Join(dir, "proc"), filepath.Join(dir, "config.yaml"), "/crio.sock")
			require.NoError(t, err)
			got.source = strings.ReplaceAll(got.source, dir, "DIR")
			assert.Equal(t, tc.want, got)
		})
	}
	_, err := readKubelet(t.TempDir(), filepath.Join(t.TempDir(), "absent"), "")
	require.ErrorIs(t, err, fs.ErrNotExist)
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte("imageServiceEndpoint: [\n"), 0o644))
	_, err = readKubelet(t.TempDir(), file, "")
	require.ErrorContains(t, err, file)
}

func TestSamePath(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "run"), 0o755))
	require.NoError(t, os.Symlink("run", filepath.Join(dir, "link")))
	assert.True(t, samePath(filepath.Join(dir, "link", "image.sock"), filepath.Join(dir, "run", "image.sock")))
	assert.False(t, samePath(filepath.Join(dir, "run", "other.sock"), filepath.Join(dir, "run", "image.sock")))
	assert.False(t, samePath("", ""))
	assert.Equal(t, "/a/b.sock", socketOf("unix:///a/b.sock"))
	assert.Equal(t, "/a/b.sock", socketOf("/a/b.sock"))
}
